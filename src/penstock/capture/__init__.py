"""What rollouts recorded, as trajectories: each token once, exactly, whatever the producer's format."""

from penstock.capture.chat import from_chat_completions, from_choices
from penstock.capture.cumulative import from_rollout, from_steps
from penstock.capture.plain import from_arrays
from penstock.capture.sampling_masks import read_sampling_mask
from penstock.capture.trajectory import Trajectory
from penstock.capture.turn import TURN_COLUMNS, Turn
from penstock.capture.verifiers import from_verifiers

__all__ = [
    "TURN_COLUMNS",
    "Trajectory",
    "Turn",
    "from_arrays",
    "from_chat_completions",
    "from_choices",
    "from_rollout",
    "from_steps",
    "from_verifiers",
    "read_sampling_mask",
]
