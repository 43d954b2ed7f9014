"""Placing roles on devices: inventory and requests in, a plan out, without Ray."""

from rolegraph.placement.planner import plan
from rolegraph.placement.requests import requests, this_machine
from rolegraph.placement.types import Device, Inventory, Node, PlacementConfig, Plan, RoleRequest, Slot

__all__ = [
    "Device",
    "Inventory",
    "Node",
    "PlacementConfig",
    "Plan",
    "RoleRequest",
    "Slot",
    "plan",
    "requests",
    "this_machine",
]
