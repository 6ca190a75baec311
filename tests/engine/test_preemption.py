# SPDX-License-Identifier: Apache-2.0
"""A sequence that is preempted and comes back in one plan: what was in flight is dropped."""

from detjax.engine.config import ReplicaConfig
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import Sequence
from detjax.engine.scheduling.scheduler import Scheduler

PAGE = 4


def config(num_pages: int) -> ReplicaConfig:
    return ReplicaConfig(
        mode="dvr", num_replicas=1, num_slots=2, num_pages=num_pages, page_len=PAGE,
        table_lens=(num_pages,), prefill_shapes=((2, 8),), decode_sizes=(2,), verify_sizes=(1,),
        verify_window=4, verify_patience=50, verify_deadline=50, max_tokens_per_step=100,
        max_prefill_streak=1, max_draft_fraction=1.0, max_draft_batch=0,
        adapts_drafts=False, draft_lens=(3,), decode_steps=1, draft_weights="full",
        ageing_steps=10, has_prefix_cache=False, has_prompt_lookup=False, self_check="off",
    )  # fmt: skip


def test_results_of_before_a_preemption_do_not_count_for_a_sequence_that_runs_again():
    """The first takes the page that the second's drafts reach into, and both run on."""
    scheduler = Scheduler(config(num_pages=5))

    def add(request_id: int, *, max_len: int, is_drafted: bool):
        asked = Request(prompt_token_ids=(1,) * 7, sampling=SamplingParams())
        seq = Sequence(
            request_id=request_id, sequence_idx=0, request=asked, sampling=asked.sampling,
            max_len=max_len,
            is_drafted=is_drafted, is_canonical=True,
        )  # fmt: skip
        scheduler.add(seq)
        return seq

    first = add(0, max_len=3 * PAGE, is_drafted=False)
    second = add(1, max_len=4 * PAGE, is_drafted=True)
    in_flight: list = []
    for _ in range(4):
        batch = scheduler.schedule()
        scheduler.confirm_launch()
        if scheduler.num_preempted:
            break
        # Results are read a step late.
        for row in in_flight:
            assert scheduler.is_current(row)
            scheduler.note_read(row)
            if row.seq is first or hasattr(row, "is_last"):
                scheduler.commit(row.seq, 2)
        in_flight = [row for part in (*batch.prefills, *batch.decodes) for row in part]
    assert scheduler.num_preempted == 1 and scheduler.running == [first, second]
    [before] = [row for row in in_flight if row.seq is second]
    assert not scheduler.is_current(before)
    [again] = [row for part in batch.prefills for row in part]
    assert again.seq is second and scheduler.is_current(again)
