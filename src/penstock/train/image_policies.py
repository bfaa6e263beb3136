"""What happens to a sample one of whose images cannot be read: the step fails, or that sample's loss is masked.

Never the whole row, and never silently: training on blank images hides the loss of data.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from penstock.errors import AssetError, ConfigError


class Policy(Protocol):
    """Decides over the samples whose images are missing, cut short or have another hash."""

    def judge(self, num_samples: int, broken: Mapping[int, AssetError]) -> tuple[int, ...]:
        """The samples to mask, of `num_samples` with images and those `broken` among them; or raises."""


class Fail:
    """Any unreadable image is an error. The default."""

    def judge(self, num_samples: int, broken: Mapping[int, AssetError]) -> tuple[int, ...]:  # noqa: ARG002 - the protocol's
        for error in broken.values():
            raise error
        return ()


class MaskSample:
    """Mask the loss of the affected samples, as long as they are few.

    >>> policy = MaskSample(max_fraction=0.01)
    >>> policy.judge(50, {3: AssetError("image gone")}), policy.masked, policy.seen
    ((3,), 1, 50)
    """

    def __init__(self, *, max_fraction: float, over: int = 100) -> None:
        """At most `max_fraction` of all samples with images since the start, judged as if at least `over` were seen."""
        if not 0 < max_fraction < 1 or over < 1 or max_fraction * over < 1:
            raise ConfigError(
                f"max_fraction {max_fraction} over {over} samples: the fraction must be between 0 and 1 and allow one"
            )
        self._max_fraction = max_fraction
        self._over = over
        self._lock = threading.Lock()
        self.seen = 0
        """Samples with images so far."""
        self.masked = 0
        """Of those, the ones masked."""

    def judge(self, num_samples: int, broken: Mapping[int, AssetError]) -> tuple[int, ...]:
        with self._lock:
            self.seen += num_samples
            self.masked += len(broken)
            seen, masked = self.seen, self.masked
        if broken and masked > self._max_fraction * max(seen, self._over):
            first = next(iter(broken.values()))
            raise type(first)(
                f"{masked} of {seen} samples with images have unreadable ones; at most {self._max_fraction:g} of "
                f"at least {self._over} may be masked. The last: {first}",
                error_type=first.error_type,
                missing=first.missing,
            ) from first
        return tuple(sorted(broken))
