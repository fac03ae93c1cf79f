"""Muon."""

from ..optimizers import Muon as Muon
from ..optimizers import polar as polar
