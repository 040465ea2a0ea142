"""Refuse OpenAI's grader endpoints, which serve only reinforcement fine-tuning."""

from __future__ import annotations

from typing import NoReturn

from fastapi import APIRouter

from app.deps import CustomerDep
from app.errors import InvalidRequest

router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["fine-tuning"])


@router.post("/run", response_model=None)
@router.post("/validate", response_model=None)
def refuse(caller: CustomerDep) -> NoReturn:
    """Refuse: graders belong to reinforcement fine-tuning, which is not offered here."""
    message = "Graders serve reinforcement fine-tuning, which is not offered here; allowed methods: supervised and dpo."
    raise InvalidRequest(message, code="method_not_supported", param="grader")
