"""What one writes without a library: msgpack of Python lists over ZeroMQ, from the producers straight to the ranks.

Nothing stands in between: no plan, no disk, no check. Group i goes to rank i modulo ranks.
"""

from __future__ import annotations

import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from .inputs import CASES, Group, add, make_groups, read_all, sums_of
from .serving import PATIENCE_S, Crew, Meter, Request, Round, check, obey, serve

PRODUCERS = 2


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        producers, ranks = Crew(_producer, PRODUCERS), Crew(_rank, int(sys.argv[2]))
        urls = [answer["url"] for answer in ranks.ask({"do": "bind", "folder": folder})]
        producers.ask({"do": "connect", "urls": urls})

        def run(request: Request) -> Round:
            count, case = int(request["ranks"]), CASES[request["case"]]
            sent = producers.ask({"do": "prepare", "case": case.name})
            meter = Meter()
            ranks.tell({"do": "take", "groups": case.groups, "ranks": count}, count)
            producers.tell({"do": "put", "ranks": count})
            got = ranks.answers(count)
            used = meter.read(ranks=ranks.pids(count), producers=producers.pids(), plane=[])
            producers.answers()
            check(sent, got)
            return used

        serve(["lists"], {"pyzmq": zmq.__version__, "msgspec": msgspec.__version__}, run)


def _producer(number: int, pipe: Connection) -> None:
    context = zmq.Context()
    lines: list[zmq.Socket[bytes]] = []
    groups: list[tuple[int, Group]] = []

    def handle(request: Request) -> dict[str, Any]:
        match request["do"]:
            case "connect":
                lines.extend(context.socket(zmq.PUSH) for _ in request["urls"])
                for line, url in zip(lines, request["urls"], strict=True):
                    line.setsockopt(zmq.LINGER, 0)
                    line.connect(url)
            case "prepare":
                case = CASES[request["case"]]
                mine = range(number, case.groups, PRODUCERS)
                groups[:] = list(zip(mine, make_groups(case, mine, "lists"), strict=True))
                return sums_of([group for _, group in groups])
            case "put":
                for index, group in groups:
                    rows = [{name: values.tolist() for name, values in row.items()} for row in group.samples]
                    lines[index % request["ranks"]].send(msgspec.msgpack.encode(rows))
        return {}

    obey(pipe, handle)


def _rank(number: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    dtypes = {
        "token_ids": torch.int64,
        "loss_mask": torch.bool,
        "logprobs": torch.float32,
        "routed_experts": torch.uint8,
    }
    line = zmq.Context().socket(zmq.PULL)
    line.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))

    def handle(request: Request) -> dict[str, Any]:
        if request["do"] == "bind":
            line.bind(f"ipc://{request['folder']}/{number}")
            return {"url": line.getsockopt_string(zmq.LAST_ENDPOINT)}
        sums = []
        for _ in range(number, request["groups"], request["ranks"]):
            for row in msgspec.msgpack.decode(line.recv()):
                tensors = {name: torch.tensor(values, dtype=dtypes[name]) for name, values in row.items()}
                sums.append(read_all({name: tensor.numpy() for name, tensor in tensors.items()}))
        return add(sums)

    obey(pipe, handle)


if __name__ == "__main__":
    main()
