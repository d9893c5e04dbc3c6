"""Differential privacy: protect answers before they leave a client, and account for the cost."""

from __future__ import annotations

from barter.privacy.settings import Privacy

__all__ = ["Privacy"]
