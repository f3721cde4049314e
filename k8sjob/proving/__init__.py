"""Proof that a training gives the same numbers on one process and on several."""

from __future__ import annotations

from k8sjob.proving.proof import Proof, prove

__all__ = ["Proof", "prove"]
