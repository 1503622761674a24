"""Every scenario of the differential suite; each module registers its own."""

from __future__ import annotations

from . import scenario_errors, scenario_life, scenario_order, scenario_start, scenario_values
from .observe import SCENARIOS

__all__ = ("SCENARIOS", "scenario_errors", "scenario_life", "scenario_order", "scenario_start", "scenario_values")
