"""Clients that others wrote, each in the environment that has it."""

from __future__ import annotations

from pathlib import Path

from serve_checks.server import RunningServer


def run_clients(server: RunningServer, pythons: dict[str, str], directory: Path) -> list[str]:
    return []
