"""Images by reference: each image stored once by content hash; pixels exist only on the rank that trains on them."""

from penstock.assets.claims import remove_run
from penstock.assets.deltas import Branch, Delta, image_delta, longest_prefix
from penstock.assets.features import FeatureStore, sweep
from penstock.assets.fingerprints import feature_fingerprint, processor_fingerprint
from penstock.assets.image_ref import ImageRef, describe, span
from penstock.assets.layouts import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, Layout, layout_from_config
from penstock.assets.object_store import ObjectStore
from penstock.assets.offload import image_lookup, inline_messages, offload_messages
from penstock.assets.probe import Limits, probe
from penstock.assets.processors import FromCallable, Processor
from penstock.assets.references import FeatureRef, RawRef, parse
from penstock.assets.resolve import Resolved, Slot, raw_reference, resolve, retry_in_full
from penstock.assets.store import AssetStore
from penstock.assets.threads import worker_environment

__all__ = [
    "QWEN2_5_VL",
    "QWEN2_VL",
    "QWEN3_VL",
    "AssetStore",
    "Branch",
    "Delta",
    "FeatureRef",
    "FeatureStore",
    "FromCallable",
    "ImageRef",
    "Layout",
    "Limits",
    "ObjectStore",
    "Processor",
    "RawRef",
    "Resolved",
    "Slot",
    "describe",
    "feature_fingerprint",
    "image_delta",
    "image_lookup",
    "inline_messages",
    "layout_from_config",
    "longest_prefix",
    "offload_messages",
    "parse",
    "probe",
    "processor_fingerprint",
    "raw_reference",
    "remove_run",
    "resolve",
    "retry_in_full",
    "span",
    "sweep",
    "worker_environment",
]
