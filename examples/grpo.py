"""GRPO on a Hugging Face model, on-policy: generate, put, step, train, checkpoint, commit, export.

    python examples/grpo.py runs/grpo                  a tiny model, built from a configuration
    python examples/grpo.py runs/grpo --model FOLDER   a saved model

Kill it at any time and run it again: it continues with the same steps and ends with the same weights.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import penstock as ps
from penstock.train import Grpo, check_packing, row_logprobs

PROMPTS, ANSWERS, LENGTH = 8, 8, 8  # groups of a step, answers to a prompt, tokens of an answer
TINY = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": LENGTH}


def task(i):  # replace by yours: the i-th prompt of the run, and the reward of an answer to it
    prompt = torch.randint(0, 16, (2,), generator=torch.Generator().manual_seed(i)).tolist()
    return prompt, lambda answer: sum(token % 2 == prompt[0] % 2 for token in answer) / LENGTH  # odd, or even, as asked


@torch.no_grad()
def generate(model, prompt):  # in a larger run: vLLM or SGLang, in processes of their own
    ids = torch.tensor([prompt] * ANSWERS)
    out = model.generate(ids, attention_mask=ids > -1, return_dict_in_generate=True, output_logits=True, **SAMPLING)
    answers, ends = out.sequences[:, len(prompt) :], torch.tensor(model.generation_config.eos_token_id or [])
    logprobs = torch.stack(out.logits, 1).float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    kept = (is_end := torch.isin(answers, ends).int()).cumsum(-1) == is_end  # up to and including the first end token
    return [(a[k].tolist(), p[k].tolist()) for a, p, k in zip(answers, logprobs, kept, strict=True)]


def load(path):
    torch.manual_seed(0)
    if path:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(Qwen3Config(**TINY, **HEADS))


def main(folder, model, steps):
    check_packing(model, vocabulary=model.config.vocab_size)  # samples of a packed row do not see one another
    optimizer, loss, checkpoint, done = torch.optim.AdamW(model.parameters(), lr=1e-3), Grpo(), folder / "last.pt", 0
    if checkpoint.exists():
        states, done = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(states[0]), optimizer.load_state_dict(states[1])
    on_policy = {"capacity": PROMPTS, "max_staleness": 0}  # one step at a time, from the newest weights
    plane = ps.open(folder, ranks=1, seq_len=256, groups_per_step=PROMPTS, **on_policy)
    with plane, plane.source(rank=0, resume_step=done + 1) as source, ps.TokenExporter(folder) as exporter:
        for number in range(done + 1, steps + 1):
            for i in range(plane.ledger.accepted // ANSWERS, number * PROMPTS):  # after a restart: what is missing
                torch.manual_seed(i)
                prompt, reward = task(i)
                with plane.group(f"repeat {prompt[0]}", policy_version=number - 1) as group:
                    for answer, logprobs in generate(model, prompt):
                        turns = [ps.Turn(prompt), ps.Turn(answer, logprobs=logprobs)]
                        group.add(ps.Trajectory(turns=turns, reward=reward(answer), env="repeat"))
            step = source.step(number, timeout=60)
            for batch in step:
                tensors = ps.to_torch(batch)
                terms = loss(tensors, *row_logprobs(model, tensors))  # log-probability and entropy of each token
                terms.mean(step.denominators).backward()
                exporter.write(step, batch, terms, policy_version=number - 1)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(), optimizer.zero_grad()
            exporter.close_step(step), exporter.flush()  # on disk before the checkpoint
            if number % 10 == 0 or number == steps:  # before the commit: a restart resumes at the last checkpoint
                torch.save(((model.state_dict(), optimizer.state_dict()), number), folder / "new.pt")
                (folder / "new.pt").replace(checkpoint)
            source.commit(step, policy_version=number)
            mean = sum(float(sample["rewards"][0]) for sample in step.samples()) / (PROMPTS * ANSWERS)
            print(f"step {number} reward {mean:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="folder of a saved Hugging Face model")
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    main(args.folder, load(args.model), args.steps)
