"""The decode engine that embeds the store. See `Engine`; how a request comes by its cache is `admission.admit`."""

from duokv.engine.engine import Engine
from duokv.engine.report import EngineStats, Finish, Handle, Output, RequestReport
from duokv.engine.sampler import Sampling
from duokv.engine.settings import EngineConfig, namespace_of

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Finish",
    "Handle",
    "Output",
    "RequestReport",
    "Sampling",
    "namespace_of",
]
