"""Differential privacy: protect clients' answers and account for the cost."""

from __future__ import annotations

from barter.privacy.settings import Privacy

__all__ = ["Privacy"]
