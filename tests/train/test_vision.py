"""What reaches an image model: its placeholders are images, every one of them, or nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.arrays import ImageSpan, Sample
from penstock.assets import AssetStore
from penstock.capture import Trajectory, Turn
from penstock.convert import make_group
from penstock.demo.tasks import COLOR_MODEL, model_of
from penstock.errors import IncompatibleAsset, InvalidInput, MissingAsset
from penstock.packing import MicroBatch, Packing, pack
from penstock.packing.forest import grow
from penstock.testing import draw_screenshot
from penstock.train.run_config import ImagesConfig, TrainConfig
from penstock.train.trainer import Trainer
from penstock.train.vision import samples_through

ONE_RANK = Packing(ranks=1, seq_len=64)
IMAGE, VIDEO = COLOR_MODEL["image_token_id"], COLOR_MODEL["video_token_id"]


def batch_of(*samples: Sample) -> MicroBatch:
    (batch,) = pack(samples, ranks=1, seq_len=64).ranks[0]
    return batch


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp("run")
    with closing(Trainer(TrainConfig(folder=str(folder), packing=ONE_RANK, model=model_of("color")), rank=0)) as made:
        yield made


def test_placeholders_without_an_image_are_refused_before_the_forward_pass(trainer: Trainer) -> None:
    turns = [Turn([1, 3, IMAGE, IMAGE, 4]), Turn([8, 9], logprobs=[-0.5, -0.5])]  # images= left out
    (sample,) = make_group([Trajectory(turns=turns, reward=1.0)], id="g").samples
    with pytest.raises(InvalidInput, match=rf"sample 'g/0': token 2 of the row is {IMAGE}, the model's image token"):
        trainer._prepare(batch_of(sample))


def test_video_tokens_are_refused_before_the_forward_pass(trainer: Trainer) -> None:
    sample = Sample(id="v", token_ids=[1, VIDEO, 2], loss_mask=[0, 0, 1])
    with pytest.raises(InvalidInput, match=rf"sample 'v': token 1 of the row is the video token {VIDEO}"):
        trainer._prepare(batch_of(sample))


def test_an_image_whose_tokens_are_no_placeholders_is_refused(trainer: Trainer) -> None:
    span = ImageSpan(hash="0" * 64, grid=(1, 4, 4), offset=1, length=4)
    with pytest.raises(InvalidInput, match=rf"token 1 of the row is 7, in the span of an image.*token is {IMAGE}"):
        trainer._prepare(batch_of(Sample(id="i", token_ids=[7] * 8, images=[span])))


def test_a_model_without_eyes_refuses_images(tmp_path: Path) -> None:
    config = TrainConfig(folder=str(tmp_path), packing=ONE_RANK, model=model_of("reverse"))
    span = ImageSpan(hash="0" * 64, grid=(1, 4, 4), offset=1, length=4)
    sample = Sample(id="i", token_ids=[0] * 12, images=[span])
    refused = pytest.raises(InvalidInput, match=r"sample 'i': has an image, but the model \(qwen3\) accepts none")
    with closing(Trainer(config, rank=0)) as blind, refused:
        blind._prepare(batch_of(sample))


def test_a_lost_image_masks_every_sample_on_whose_path_it_is() -> None:
    forest = grow(np.array([5, 5, 3]), np.array([0, 3, 2]), columns={})  # (a b)(c)(d e)(x y)(z)
    assert samples_through(forest, [1]) == (0, 1)
    assert samples_through(forest, [0]) == (0, 1, 2)
    assert samples_through(forest, [3, 4]) == (1, 2)


def with_image(digest: str) -> MicroBatch:
    span = ImageSpan(hash=digest, grid=(1, 4, 4), offset=1, length=4)
    ids, mask = [1, *([IMAGE] * 4), 8, 9], [0, 0, 0, 0, 0, 1, 1]
    return batch_of(Sample(id="i", token_ids=ids, loss_mask=mask, images=[span]))


def test_a_setting_names_the_asset_store_and_its_run(tmp_path: Path) -> None:
    store = AssetStore(tmp_path / "pictures", run="mine")
    found = store.put(draw_screenshot(seed=1))
    images = ImagesConfig(folder=str(tmp_path / "pictures"), run="mine")
    config = TrainConfig(folder=str(tmp_path / "run"), packing=ONE_RANK, model=model_of("color"), images=images)
    with closing(Trainer(config, rank=0)) as sees:
        assert sees._vision is not None
        with pytest.raises(IncompatibleAsset):  # it is found there, and is of another size than the span says
            sees._prepare(with_image(found.hash))
        with pytest.raises(MissingAsset):
            sees._prepare(with_image("0" * 64))


def test_a_setting_masks_samples_whose_image_is_lost(tmp_path: Path) -> None:
    images = ImagesConfig(max_masked=0.5)
    config = TrainConfig(folder=str(tmp_path), packing=ONE_RANK, model=model_of("color"), images=images)
    with closing(Trainer(config, rank=0)) as tolerant:
        tolerant._prepare(with_image("0" * 64))
        assert tolerant._vision is not None
        assert tolerant._vision.metrics()["train/image_masked_samples"] == 1
