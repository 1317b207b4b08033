"""DuoKV's store: persistent Block KV, in-memory SWA KV, one key. See KVStore."""

from duokv.kvstore.answers import Commit, PrefixHit, StoreStats
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig, load_config
from duokv.kvstore.errors import DuoKVError, StoreError, UsageError
from duokv.kvstore.events import RequestServed
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import BlockKeys, Media, Namespace, chain_keys
from duokv.kvstore.opening import open_store
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import ClassRule, Policy
from duokv.kvstore.store import KVStore
from duokv.kvstore.swa import SwaWindow

__all__ = [
    "BlockKeys",
    "CacheGeometry",
    "ClassRule",
    "Clock",
    "Commit",
    "DuoKVError",
    "KVStore",
    "Media",
    "Namespace",
    "Origin",
    "Policy",
    "PrefixHit",
    "RequestServed",
    "StoreConfig",
    "StoreError",
    "StoreStats",
    "SwaWindow",
    "UsageError",
    "chain_keys",
    "load_config",
    "open_store",
]
