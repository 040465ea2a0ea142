"""Receivers of webhooks that are slow, wrong, elsewhere, without end or silent: F34 of the table."""

from __future__ import annotations

from threading import Thread

import pytest
from sqlalchemy import select, update

from app.db import read, transaction
from app.db.tables import JobStatus, WebhookDelivery
from app.jobs import service as jobs
from app.webhooks.delivery import ATTEMPTS, Courier
from tests.faults import invariants, sleeper
from tests.faults.mailbox import BAD, Answer, Mailbox
from tests.faults.processes import context
from tests.faults.storm import CALM
from tests.worker.shop import Shop, wait_until

_TIMES, _BUFFERED = 3, 32 << 20  # what sockets of a machine take in before anybody reads


@pytest.mark.parametrize("answer", BAD)
def test_a_bad_receiver_hears_each_event_until_it_takes_it_and_holds_up_no_job(
    shop: Shop, box: Mailbox, answer: Answer
) -> None:
    box.plan = [answer] * _TIMES
    accepted = [shop.add_job() for _ in range(3)]
    values, guards = shop.settings(**CALM).model_dump(), shop.folder.parent / "guards"
    worker = context().Process(target=sleeper.serve, args=(values, guards, None))
    worker.start()
    try:
        ended = [shop.until_ended(job_id) for job_id in accepted]
        wait_until(lambda: [row.status for row in _deliveries(shop)] == ["delivered"] * 3)
    finally:
        worker.kill()
        worker.join()
    assert {(job.status, job.attempt) for job in ended} == {(JobStatus.succeeded, 1)}
    assert "reaped" not in sleeper.counts(guards)
    for row in _deliveries(shop):
        answers = [each.answer for each in box.messages() if each.event_id == row.event_id]
        assert answers[:_TIMES] == [answer] * _TIMES
        assert set(answers[_TIMES:]) == {"taken"}  # more than once if its answer was not awaited
        assert row.attempts > _TIMES
    assert box.sent < 3 * _TIMES * _BUFFERED
    assert box.sent or answer != "endless", "vacuous: nothing was sent"
    invariants.check(shop, accepted)


def test_a_failure_that_is_noted_late_takes_back_no_delivery(shop: Shop, box: Mailbox) -> None:
    box.plan, box.hang_s = ["hangs"], 120.0
    job_id, couriers = shop.add_job(), [Courier(shop.engine, allow_local=True) for _ in range(2)]
    with transaction(shop.engine) as session:
        jobs.cancel(session, shop.key.project_id, job_id)
        session.execute(update(WebhookDelivery).values(attempts=ATTEMPTS - 1))
    slow = Thread(target=couriers[0].deliver_due)
    slow.start()
    wait_until(lambda: len(box.messages()) == 1)
    with transaction(shop.engine) as session:
        session.execute(update(WebhookDelivery).values(due_at=0.0))
    assert couriers[1].deliver_due() == 1
    box.hung_up.set()
    slow.join()
    assert [(row.status, row.outcome) for row in _deliveries(shop)] == [("delivered", "answered 200")]


def _deliveries(shop: Shop) -> list[WebhookDelivery]:
    with read(shop.engine) as session:
        return list(session.scalars(select(WebhookDelivery)))
