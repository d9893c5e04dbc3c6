"""What an answer tells of a private image before it leaves a client, and what all answers of a run tell together."""

from __future__ import annotations

from barter.privacy.settings import Privacy

__all__ = ["Privacy"]
