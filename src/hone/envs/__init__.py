"""Environments: what answers the policy's turns. The default is none: one turn, then rewards."""

from hone.envs.env import Answer, Env, Episode
from hone.types import Observation

__all__ = ["Answer", "Env", "Episode", "Observation"]
