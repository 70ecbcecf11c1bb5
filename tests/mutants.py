"""Small mistakes that the tests must notice: each is put into a copy of the sources, where named tests have to fail.

    python tests/mutants.py                      all of them, after the named tests have passed without any
    python tests/mutants.py --list
    python tests/mutants.py tree- ring-show      those whose names begin so
    python tests/mutants.py --all-tests NAME     does any test of all notice it?

A mutant is one replacement. Its file is found by the text that is replaced, so that modules may move: that text must
stand in one place. What is not found, or no longer names a test, is an error: keep the table up to date.

    caught        a test failed
    SURVIVED      the tests passed: one is missing, or too weak
    DID NOT RUN   the mutant does not import, no test ran, or they did not end: it tells nothing

Each run is a process forked from this one, which has imported pytest and others but nothing of this project.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("edgespec", "backends")
LIMIT = 600.0  # seconds of a run: a mutant that never ends is not one to keep
PRELOADED = ("numpy", "hypothesis", "jinja2", "pydantic", "click", "rich", "yaml", "httpx", "starlette.testclient")


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    name: str
    hint: str  # how the file's path ends: tells which, where the text stands in several
    old: str
    new: str
    tests: tuple[str, ...]  # node ids, below tests/


def mutant(name: str, hint: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, hint, old, new, tests)


CONTRACT = "test_contract.py::test_contract"

MUTANTS = [
    # Verification.
    mutant(
        "verify-other-parents",
        "verify.py",
        "children.get((path[-1], token))",
        "children.get((0, token))",
        "test_verify.py::test_a_whole_branch_and_its_bonus",
    ),
    mutant(
        "verify-no-bonus",
        "verify.py",
        "return Walk(path, output)",
        "return Walk(path, output[:-1])",
        "test_verify.py::test_plain_decoding",
    ),
    mutant(
        "verify-accepted-unseen",
        "verify.py",
        "token = sample(path[-1], output)",
        "token = sample(path[-1], [])",
        "test_verify.py::test_a_whole_branch_and_its_bonus",
    ),
    mutant(
        "verify-nodes-from-one",
        "verify.py",
        "in enumerate(nodes)}",
        "in enumerate(nodes, 1)}",
        "test_verify.py::test_it_reads_off_the_targets_text",
    ),
    # Sampling.
    mutant(
        "sampling-key-swapped",
        "sampling.py",
        "[self.seed, position], np.uint64",
        "[position, self.seed], np.uint64",
        "test_sampling.py::TestNoise::test_known_values",
    ),
    mutant(
        "sampling-noise-infinite",
        "sampling.py",
        "(bits + 0.5) * 2.0**-32",
        "(bits + 1.0) * 2.0**-32",
        "test_sampling.py::test_no_token_that_noise_can_lift_to_the_top_is_left_out",
    ),
    mutant(
        "sampling-excess-too-small",
        "sampling.py",
        "_EXCESS = 4.0",
        "_EXCESS = 2.0",
        "test_sampling.py::test_no_token_that_noise_can_lift_to_the_top_is_left_out",
    ),
    mutant(
        "sampling-ties-keep-all",
        "sampling.py",
        "no_better[token:] |= adjusted[token:] == adjusted[token]",
        "no_better |= adjusted == adjusted[token]",
        "test_sampling.py::test_a_seed_has_the_token_of_a_full_sort",
    ),
    mutant(
        "sampling-rounding-decides",
        "sampling.py",
        "_MASS_ERROR = 1e-4",
        "_MASS_ERROR = 0",
        "test_sampling.py::test_a_seed_has_the_token_of_a_full_sort_where_rounding_decides_what_top_p_keeps",
    ),
    mutant(
        "sampling-nucleus-one-less",
        "sampling.py",
        "dtype=np.float64), top_p)) + 1",
        "dtype=np.float64), top_p)) or 1",
        "test_sampling.py::test_candidates_are_the_naive_ones",
    ),
    mutant(
        "sampling-nucleus-of-all",
        "sampling.py",
        "np.exp(kept - log_sum_exp(kept))",
        "np.exp(kept - log_sum_exp(logits))",
        "test_sampling.py::test_candidates_are_the_naive_ones",
    ),
    mutant(
        "sampling-min-p-unrelated",
        "sampling.py",
        "floor = logits.max() + math.log(params.min_p)",
        "floor = math.log(params.min_p)",
        "test_sampling.py::test_candidates_are_the_naive_ones",
    ),
    mutant(
        "sampling-repetition-rewards",
        "sampling.py",
        "values > 0, values / params.repetition_penalty",
        "values < 0, values / params.repetition_penalty",
        "test_sampling.py::TestAdjust::test_against_the_definition",
    ),
    mutant(
        "sampling-frequency-once",
        "sampling.py",
        "params.frequency_penalty * counts",
        "params.frequency_penalty * (counts > 0)",
        "test_sampling.py::TestAdjust::test_against_the_definition",
    ),
    mutant(
        "sampling-top-ids-ties",
        "sampling.py",
        "np.flatnonzero(values >= threshold)",
        "np.flatnonzero(values > threshold)",
        "test_sampling.py::test_top_ids_is_a_stable_sort",
    ),
    mutant(
        "sampling-greedy-unadjusted",
        "sampling.py",
        "return int(adjusted.argmax())",
        "return int(logits.argmax())",
        "test_lossless_unit.py::test_without_filters_it_is_exact",
    ),
    mutant(
        "sampling-noise-scaled",
        "sampling.py",
        "_scaled(logits, params) + gumbel",
        "_scaled(logits, params) + gumbel * params.temperature",
        "test_sampling.py::test_samples_follow_the_softmax",
    ),
    # The tree.
    mutant(
        "tree-one-leaf-more",
        "tree.py",
        "adds_leaf and leaves == max_leaves",
        "adds_leaf and leaves > max_leaves",
        "test_tree.py::test_a_limit_on_leaves_prefers_depth_to_worse_branches",
    ),
    mutant(
        "tree-every-node-a-leaf",
        "tree.py",
        "leaves += adds_leaf",
        "leaves += 1",
        "test_tree.py::test_ranked_is_maximal",
    ),
    mutant(
        "tree-one-node-more",
        "tree.py",
        "return order[:budget]",
        "return order[: budget + 1]",
        "test_tree.py::test_ranked_is_the_best_of_all_trees",
    ),
    mutant(
        "tree-one-node-more-where-leaves-are-few",
        "tree.py",
        "if len(found) == budget:",
        "if len(found) > budget:",
        "test_tree.py::test_best_nodes_is_a_tree_within_its_limits",
    ),
    mutant(
        "tree-worst-first",
        "tree.py",
        "np.argsort(-log_probs[1:]",
        "np.argsort(log_probs[1:]",
        "test_tree.py::test_ranked_is_the_best_of_all_trees",
    ),
    mutant(
        "tree-parents-renumbered",
        "tree.py",
        "np.cumsum(keep, dtype=np.int32) - 1",
        "np.cumsum(keep, dtype=np.int32)",
        "test_tree.py::test_best_nodes_is_a_tree_within_its_limits",
    ),
    mutant(
        "tree-mask-of-parents",
        "tree.py",
        "mask[node] |= mask[up[node]]",
        "mask[node, up[node]] = True",
        "test_tree.py::test_mask_leaves_depth_and_path_agree",
    ),
    mutant(
        "tree-shallow-by-one",
        "tree.py",
        "tree.depth <= max(0, depth)",
        "tree.depth < max(1, depth)",
        "test_search.py::test_what_lies_behind_the_end_of_the_text_is_not_sent",
    ),
    mutant(
        "tree-orphans-to-the-first",
        "tree.py",
        "new.get(parents[node], -1)",
        "new.get(parents[node], 0)",
        "test_tree.py::test_a_kept_node_without_a_kept_parent_is_a_top",
    ),
    # The loop.
    mutant(
        "loop-bonus-without-room",
        "generate.py",
        "return self._limit - len(self.token_ids) - 1",
        "return self._limit - len(self.token_ids)",
        "test_lossless_reference.py::test_no_node_is_deeper_than_the_text_can_still_go",
    ),
    mutant(
        "loop-commit-beyond-the-end",
        "generate.py",
        "tree, found.path[: len(output)]",
        "tree, found.path",
        "test_lossless_reference.py::test_end_of_text_in_the_middle_of_a_pass",
    ),
    mutant(
        "loop-stop-token-lost",
        "generate.py",
        'return output[: i + 1], "stop"',
        'return output[:i], "stop"',
        "test_lossless_reference.py::test_end_of_text_in_the_middle_of_a_pass",
    ),
    mutant(
        "loop-one-token-more",
        "generate.py",
        '"length" if len(output) >= room',
        '"length" if len(output) > room',
        "test_lossless_reference.py::test_max_tokens_is_exact",
    ),
    mutant(
        "loop-noise-of-the-root",
        "generate.py",
        "position = len(self.token_ids) + len(accepted)",
        "position = len(self.token_ids)",
        "test_lossless_reference.py::test_the_same_text[sssd]",
    ),
    mutant(
        "loop-penalties-without-accepted",
        "generate.py",
        "self.token_ids[len(self._prompt_ids) :] + accepted if",
        "self.token_ids[len(self._prompt_ids) :] if",
        "test_lossless_reference.py::test_the_same_text[specexec]",
    ),
    mutant(
        "loop-beyond-the-context",
        "generate.py",
        "self._limit = min(len(prompt_ids) + max_tokens, limits.context_length)",
        "self._limit = len(prompt_ids) + max_tokens",
        "test_lossless_reference.py::test_the_end_of_the_context",
    ),
    mutant(
        "loop-sources-shifted",
        "generate.py",
        "tree.source[found.path[1:]])",
        "tree.source[found.path[:-1]])",
        "test_lossless_reference.py::test_a_perfect_draft_is_always_right",
    ),
    mutant(
        "loop-first-token-waits-for-the-draft",
        "generate.py",
        "self._budget and self._room > 0 and not self.prompt.unread",
        "self._budget and self._room > 0",
        "test_draft_reads.py::test_another_sequence_waits_for_one_chunk_at_most",
    ),
    mutant(
        "pool-row-of-another-prompt",
        "session_pool.py",
        "if other == prompt",
        "if other[:9] == prompt[:9]",
        "test_first_token.py::test_the_text_does_not_depend_on_what_was_cached",
    ),
    mutant(
        "verifier-first-token-of-a-tree",
        "verifier.py",
        "if len(tokens) == task.prompt_length:",
        "if not tokens:",
        "test_first_token.py::test_several_targets_write_the_same_first_token",
    ),
    # llama.cpp's cells and sessions.
    mutant(
        "session-positions",
        "common/nodes.py",
        "positions[parent] + 1 if parent >= 0 else length",
        "positions[parent] if parent >= 0 else length",
        f"{CONTRACT}[smollm2_tiny-tree_equals_chains]",
    ),
    mutant(
        "session-ancestor-unseen",
        "llamacpp/session.py",
        "stop = self.positions[old] + 1",
        "stop = self.positions[old]",
        f"{CONTRACT}[smollm2_tiny-growth_layer_by_layer]",
    ),
    mutant(
        "session-dropped-nodes-stay",
        "llamacpp/session.py",
        "start = length + count if seq == last else length",
        "start = length + count",
        f"{CONTRACT}[smollm2_tiny-random_growth]",
    ),
    mutant(
        "session-fork-shorter",
        "llamacpp/session.py",
        "self._memory, self.seq_ids[0], seq, 0, self.cached)\n        other.",
        "self._memory, self.seq_ids[0], seq, 0, self.cached - 1)\n        other.",
        f"{CONTRACT}[smollm2_tiny-forks_are_independent]",
    ),
    mutant(
        "session-rewind-one-more",
        "llamacpp/session.py",
        "self.cached = min(self.cached, length)",
        "self.cached = min(self.cached, length + 1)",
        f"{CONTRACT}[smollm2_tiny-rewind_and_go_on]",
    ),
    mutant(
        "session-cells-of-a-gap",
        "llamacpp/session.py",
        "self._cells[node] != self._base + i), len(path))",
        "self._cells[node] < self._base + i), len(path))",
        "test_cells.py::test_what_is_committed_behind_a_gap_is_owed",
    ),
    mutant(
        "session-likeliest-child-last",
        "llamacpp/session.py",
        "stack.extend(reversed(children.get(node, [])))",
        "stack.extend(children.get(node, []))",
        "test_cells.py::test_the_first_children_come_first",
    ),
    mutant(
        "session-siblings-see-each-other",
        "llamacpp/session.py",
        "if old < 0 or tips.get(seq) != old:",
        "if old < 0:",
        f"{CONTRACT}[smollm2_tiny-growth_layer_by_layer]",
    ),
    mutant(
        "session-padding-to-the-wrong-side",
        "llamacpp/session.py",
        "return -end % TILE",
        "return end % TILE",
        "test_cells.py::test_a_prompt_begins_where_a_tile_does",
    ),
    mutant(
        "cells-moved-to-another-place",
        "cells.py",
        "self.fill((start - self.end) % TILE, sessions)",
        "self.fill((self.end - start) % TILE, sessions)",
        "test_exact_llamacpp.py::test_a_prompt_goes_on_within_a_tile",
    ),
    mutant(
        "ids-lent-without-the-text",
        "ids.py",
        "session.seq_ids[0], seq, 0, session.cached)",
        "session.seq_ids[0], seq, 0, 0)",
        "test_leaf_ids.py::test_ids_go_where_leaves_are",
    ),
    mutant(
        "cells-shared-within-a-tile",
        "cells.py",
        "whole_tiles(most)",
        "most",
        "test_cells.py::test_texts_share_whole_tiles_with_the_one_that_has_most_of_them",
    ),
    mutant(
        "cells-order-counts-shared-twice",
        "cells.py",
        "self.end += session.cached - shared",
        "self.end += session.cached",
        "test_leaf_ids.py::test_forks_share_cells_also_in_a_cache_that_was_put_in_order[q8_0]",
    ),
    # Recurrent layers.
    mutant(
        "paths-from-the-highest-state",
        "paths.py",
        "start = max((i for i, node in enumerate(nodes)",
        "start = min((i for i, node in enumerate(nodes)",
        "test_paths.py::test_paths_go_on_from_the_deepest_node_that_has_a_state",
    ),
    mutant(
        "paths-step-too-short",
        "paths.py",
        "if tokens <= length - at <= room",
        "if tokens < length - at <= room",
        "test_paths.py::test_a_step_begins_where_it_has_as_many_tokens_as_the_others",
    ),
    mutant(
        "paths-states-shared-by-copies",
        "paths.py",
        "other.kept, other._marked = self.kept.copy()",
        "other.kept, other._marked = self.kept",
        "test_paths.py::TestStates::test_a_copy_is_on_its_own",
    ),
    mutant(
        "paths-state-kept-behind-a-cut",
        "paths.py",
        "sorted(self.kept) if at > length]",
        "sorted(self.kept) if at > length + 1]",
        "test_paths.py::TestStates::test_a_cut_leaves_no_state_of_more_tokens",
    ),
    # The ring of layers, what stays, and experts.
    mutant(
        "ring-shows-what-was-given-up",
        "ring.py",
        "if serial >= self._freed:  # else",
        "if serial >= 0:  # else",
        "test_streaming.py::test_a_layer_given_up_while_it_is_read_is_not_shown",
    ),
    mutant(
        "ring-layer-in-anothers-slot",
        "ring.py",
        "slot, layer = serial % len(self._occupant), self",
        "slot, layer = serial % len(self._layers), self",
        "test_streaming.py::test_a_slot_is_free_again_as_soon_as_the_next_layer_is_entered",
    ),
    mutant(
        "ring-goes-on-where-it-failed",
        "ring.py",
        "iter(()), self._freed",
        "iter(()), self._next",
        "test_streaming.py::test_a_disk_that_comes_and_goes",
    ),
    mutant(
        "residency-slots-cost-nothing",
        "residency.py",
        "repeat(part))) - slots * part",
        "repeat(part)))",
        "test_residency.py::test_every_page_has_one_place_and_all_fit",
    ),
    mutant(
        "residency-pages-of-others",
        "residency.py",
        "-(-extent.start // unit) * unit, extent.stop",
        "extent.start // unit * unit, extent.stop",
        "test_residency.py::test_every_page_has_one_place_and_all_fit",
    ),
    mutant(
        "residency-first-layers",
        "residency.py",
        "[(2 * i + 1) * count // (2 * some) for",
        "[i for",
        "test_residency.py::test_streamed_layers_lie_evenly",
    ),
    mutant(
        "residency-experts-need-no-room",
        "residency.py",
        "needed + experts_at_once",
        "needed",
        "test_gpu_layers.py::test_pools_leave_room_for_libraries_also_where_memory_is_tightest",
    ),
    mutant(
        "experts-wanted-one-goes",
        "experts.py",
        "needed = set(wanted)",
        "needed = set(missing)",
        "test_experts.py::test_what_is_wanted_now_stays",
    ),
    mutant(
        "experts-most-used-goes",
        "experts.py",
        "key=lambda slot: self.scores[self._in_slot[slot]]",
        "key=lambda slot: -self.scores[self._in_slot[slot]]",
        "test_experts.py::test_the_least_used_goes",
    ),
    mutant(
        "experts-read-from-elsewhere",
        "expert_memory.py",
        "tensor.start + expert * size",
        "tensor.start + slot * size",
        "test_expert_memory.py::test_any_passes",
    ),
    mutant(
        "experts-half-read-are-kept",
        "expert_memory.py",
        "residents.forget(expert)  # only the",
        "pass  # only the",
        "test_expert_memory.py::test_fewer_than_were_expected",
    ),
    # The scheduler, its sessions and the disk cache.
    mutant(
        "scheduler-beginnings-read-twice",
        "scheduler.py",
        "if soon <= self.pool.most_held(prompt, sender):",
        "if soon >= 0:",
        "test_scheduler.py::test_requests_that_begin_alike_read_their_beginning_once",
    ),
    mutant(
        "scheduler-tokens-told-twice",
        "requests.py",
        "new = chunks[len(known) :]",
        "new = chunks",
        "test_scheduler.py::test_random_schedules_change_no_text",
    ),
    mutant(
        "scheduler-other-tokens-after-a-restart",
        "requests.py",
        "for chunk in chunks[: len(known)]] != known:",
        "for chunk in chunks[: len(known)]] == 0:",
        "test_interrupted_step.py::test_a_request_that_begins_again_with_other_tokens_ends_with_an_error",
    ),
    mutant(
        "drive-left-requests-stay",
        "drive.py",
        "            handle.cancel()",
        "            pass",
        "test_interrupted_step.py::TestDrive::test_it_ends_its_request",
    ),
    mutant(
        "scheduler-failed-text-stays",
        "scheduler.py",
        "self._end(lane, error)\n                self.pool.renew(lane)",
        "self._end(lane, error)",
        "test_scheduler.py::test_of_texts_whose_pass_failed_nothing_is_kept",
    ),
    mutant(
        "scheduler-owed-without-room",
        "prompt_chunks.py",
        "limits.exact.prompts.most - taken - reading.session.unread_committed",
        "limits.exact.prompts.most - taken",
        "test_scheduler.py::test_tokens_that_a_reader_owes_have_room_besides_trees",
    ),
    mutant(
        "scheduler-parts-within-tiles",
        "prompt_chunks.py",
        "end = whole_tiles(end)\n",
        "pass\n",
        "test_scheduler.py::test_a_part_of_a_prompt_ends_where_a_tile_does",
    ),
    mutant(
        "scheduler-draft-reads-at-once",
        "scheduler.py",
        "self.pass_now, single=len(lanes) == 1)",
        "self.pass_now, single=True)",
        "test_draft_reads.py::test_another_sequence_waits_for_one_chunk_at_most",
    ),
    mutant(
        "scheduler-draft-is-not-waited-for",
        "session_pool.py",
        "not self.unread and self.draft_prompt is None",
        "not self.unread",
        "test_draft_reads.py::test_another_sequence_waits_for_one_chunk_at_most",
    ),
    mutant(
        "scheduler-late-interrupt-ends-a-request",
        "scheduler.py",
        "if not isinstance(error, Interrupted):",
        "if error:",
        "test_draft_reads.py::test_an_interrupt_that_came_too_late_ends_nobody",
    ),
    mutant(
        "slots-newest-gives-way",
        "session_pool.py",
        "oldest := min(idle, key=",
        "oldest := max(idle, key=",
        "test_pool.py::test_idle_texts_give_way_and_the_oldest_first",
    ),
    mutant(
        "slots-shared-cells-count-twice",
        "session_pool.py",
        "return len(tokens) - whole_tiles(shared)",
        "return len(tokens)",
        "test_pool.py::test_forks_count_once",
    ),
    mutant(
        "slots-heir-counts-too-little",
        "session_pool.py",
        "if heir and heir.forked > kept:",
        "if heir and not forks:",
        "test_held.py::test_forks_count_once_when_their_source_moves_on",
    ),
    mutant(
        "slots-room-for-one-more",
        "session_pool.py",
        "+ self._needed(handle) - common <= self.limits.cells",
        "- common <= self.limits.cells",
        "test_pool.py::test_texts_wait_until_there_are_cells_for_them",
    ),
    mutant(
        "shelf-drops-longer-texts",
        "disk_cache.py",
        "tokens[: len(saved)] == saved",
        "saved[: len(tokens)] == tokens",
        "test_saved.py::TestShelf::test_a_longer_text_takes_the_place_of_its_beginning",
    ),
    mutant(
        "shelf-drops-the-latest",
        "disk_cache.py",
        "in sorted(found):",
        "in sorted(found, reverse=True):",
        "test_saved.py::TestShelf::test_those_used_least_lately_go",
    ),
    # Planners.
    mutant(
        "search-origin-stays",
        "search.py",
        "self.log_probs[part] - self.log_probs[node]",
        "self.log_probs[part]",
        "test_search.py::test_only_the_origin_moves",
    ),
    mutant(
        "drafting-reads-beyond-its-context",
        "drafting.py",
        "or length >= self.draft.capabilities.context_length",
        "or length < 0",
        "test_draft_reads.py::test_a_draft_whose_context_is_full_reads_no_further",
    ),
    mutant(
        "auto-late-draft-reads-at-once",
        "candidates.py",
        "if self._behind(self._wanted) <= 1 + CATCH_UP:",
        "if True:",
        "test_draft_reads.py::test_a_draft_that_is_asked_late_reads_in_chunks_too",
    ),
    mutant(
        "drafting-noise-of-another-position",
        "drafting.py",
        "len(self._context.token_ids) + depth  #",
        "len(self._context.token_ids) + depth - 1  #",
        "test_lossless_reference.py::test_a_perfect_draft_is_always_right",
    ),
    mutant(
        "sssd-worse-source",
        "sssd.py",
        "if value > best:",
        "if value < best:",
        "test_sssd.py::test_a_token_gets_the_better_source",
    ),
    mutant(
        "sssd-only-the-longest",
        "sssd.py",
        "if wanted <= 0:",
        "if wanted >= 0:",
        "test_sssd.py::test_shorter_matches_are_added_until_there_are_enough",
    ),
    mutant(
        "auto-failures-forgotten",
        "auto.py",
        "self.came * left, self.hoped * left",
        "self.came, self.hoped * left",
        "test_auto.py::test_a_share_begins_with_a_belief_and_forgets",
    ),
    mutant(
        "ledger-without-allowance",
        "ledger.py",
        "return max(0.0, self._allowed + saved - self._lost - min(one.lost, 0.0)) * self.plain",
        "return 1e9",
        "test_ledger.py::test_losses_stay_within_the_allowance_and_what_one_step_takes_longer_than_predicted",
        "test_never_slower.py",
    ),
    mutant(
        "ledger-rests-of-one-length",
        "ledger.py",
        "self.rest = min(2 * self.rest, LONGEST_REST)",
        "pass",
        "test_ledger.py::test_a_way_that_loses_rests_each_time_twice_as_long",
    ),
    mutant(
        "ledger-stale-plain-pass",
        "ledger.py",
        "self._plain.append(seconds)",
        "self._plain.extend([seconds] * (not self._plain))",
        "test_ledger.py::test_a_slow_start_is_soon_forgotten",
        "test_never_slower.py",
    ),
    mutant(
        "auto-guesses-from-the-first-pass",
        "auto.py",
        "first=PLAIN_STREAMED if self.streams else PLAIN",
        "first=0",
        "test_auto.py::test_the_first_passes_of_all_are_plain",
    ),
    mutant(
        "datastore-range-empty",
        "datastore.py",
        "bisect_right(self._order, wanted, low,",
        "bisect_left(self._order, wanted, low,",
        "test_datastore.py::test_find_and_continuations_equal_brute_force",
    ),
    mutant(
        "datastore-repeats-the-match",
        "datastore.py",
        "len(self)).astype(np.int64) + skip",
        "len(self)).astype(np.int64)",
        "test_datastore.py::test_find_and_continuations_equal_brute_force",
    ),
    # What the server reads.
    mutant(
        "call-formats-values-stripped",
        "call_formats.py",
        'value.removeprefix("\\n").removesuffix("\\n")',
        "value",
        "test_server_forced.py::test_a_forced_call_is_written_as_the_template_does_and_by_the_schema",
    ),
    mutant(
        "parse-output-call-anywhere",
        "parse_output.py",
        "self._blank = self._blank and not text.strip()",
        "self._blank = True",
        "test_server_forms.py::test_what_is_thought_is_told_apart",
        "test_server_forms.py::test_llama_calls_without_a_marker_only_where_the_answer_begins",
    ),
    mutant(
        "parse-output-half-a-marker-is-said",
        "parse_output.py",
        "sure -= max(overlap(",
        "sure -= 0 * max(overlap(",
        "test_server_tools.py::test_calls_are_found_however_the_text_comes",
    ),
    mutant(
        "messages-header-stays",
        "messages.py",
        'partition("\\n")[2]',
        'partition("\\n")[0]',
        "test_server.py::TestMessages::test_an_answer_and_a_stream",
    ),
    mutant(
        "messages-cached-counted-twice",
        "messages.py",
        "len(answer.request.prompt_ids) - stats.cached_tokens",
        "len(answer.request.prompt_ids)",
        "test_server.py::TestMessages::test_stop_sequences_and_counts",
    ),
    mutant(
        "constrained-argument-twice",
        "constrained.py",
        "{behind[i + 1]}",
        "{behind[i]}",
        "test_server_forced.py::test_braces_hold_each_key_once",
    ),
    mutant(
        "constrained-channel-left-out",
        "constrained.py",
        'f"{rules.spelled(opening)} {ANSWER}" if opening else ANSWER',
        "ANSWER",
        "test_server_forced.py::test_forms_and_thoughts_in_channels",
    ),
    mutant(
        "schema-strings-become-values",
        "schema.py",
        'return found if fits or "string" not in self.types else text',
        "return found",
        "test_server_forced.py::test_a_schema_is_understood_once",
    ),
    mutant(
        "schema-a-rule-for-each-reference",
        "constrained.py",
        "        if schema not in self._values:",
        "        if True:",
        "test_server_forced.py::test_a_schema_may_refer_to_itself",
    ),
    mutant(
        "service-grammars-share-threads",
        "service.py",
        "loop.run_in_executor(self._grammars,",
        "loop.run_in_executor(None,",
        "test_server.py::test_a_slow_schema_stops_no_other_request",
    ),
    mutant(
        "service-grammars-wait-uncounted",
        "service.py",
        "scheduler.waiting + self._preparing",
        "scheduler.waiting",
        "test_server.py::test_requests_that_wait_for_a_grammar_count_as_waiting",
    ),
    mutant(
        "answers-end-twice",
        "answers.py",
        "if number not in left:",
        "if False:",
        "test_server.py::test_an_end_that_is_reported_twice_counts_once",
    ),
    mutant(
        "responses-turns-split",
        "responses.py",
        'found[-1].role == "assistant" and not thought',
        "found[-1].calls",
        "test_server_tools.py::TestDialects::test_a_text_and_the_call_behind_it_are_one_turn",
    ),
    mutant(
        "grammar-bits-reversed",
        "grammar.py",
        'bitorder="little"',
        'bitorder="big"',
        "test_grammar.py::test_forced_text_saves_passes_and_imposes_nothing",
    ),
    mutant(
        "grammar-guesses-against-it",
        "grammar.py",
        "not matcher.is_stopped() and matcher.validate_tokens([token])",
        "not matcher.is_stopped()",
        "test_grammar.py::test_a_tree_loses_what_is_refused_and_gains_what_is_forced",
    ),
    # Plans of memory, and layers on a GPU.
    mutant(
        "gpu-layers-divided",
        "gpu.py",
        "room -= (parts - 1) * max(sizes)",
        "room -= 0 * max(sizes)",
        "test_gpu_layers.py::test_a_layer_is_not_divided_among_gpus",
    ),
    mutant(
        "gpu-large-draft-first",
        "gpu.py",
        "if drafts <= room // 2:",
        "if drafts <= room:",
        "test_gpu_layers.py::test_the_draft_first_if_it_is_small",
    ),
    mutant(
        "gpu-span-without-its-first-layer",
        "weights/plan.py",
        "on_processor = place < first or",
        "on_processor = place <= first or",
        "test_gpu_layers.py::test_a_mac_that_streams",
        "test_gpu_layers.py::test_layers_out_of_order",
        "test_gpu_layers.py::test_the_output_may_lie_in_front",
    ),
    mutant(
        "gpu-output-not-counted",
        "weights/plan.py",
        "max(0, count + 1 - gpu_layers)",
        "max(0, count - gpu_layers)",
        "test_gpu_layers.py::test_of_so_many_layers_the_output_is_one",
    ),
    mutant(
        "gpu-draft-without-buffers",
        "llamacpp/memory.py",
        " + self._tokenizers[path] + buffers",
        "",
        "test_offload_llamacpp.py::test_a_draft_takes_its_part",
    ),
    mutant(
        "memory-caches-where-weights-have-room",
        "memory/planning.py",
        "return weights + self.needs([size])[0] + self._drafts(size) <= self.room",
        "return True",
        "test_offload_llamacpp.py::test_many_sessions_share_cells_where_each_cannot_have_a_whole_context",
    ),
    mutant(
        "cells-all-copied-at-once",
        "cells.py",
        "self._part = min(window or TILE, TILE)",
        "self._part = window or sys.maxsize",
        "test_cells.py::test_where_memory_is_short_cells_are_put_in_order_without_a_copy_of_all_texts",
    ),
    mutant(
        "class-beyond-what-was-tried",
        "loading/exact.py",
        "    most = min(tried.most, most)\n",
        "",
        "test_exact.py::test_a_class_reaches_no_further_than_was_tried",
    ),
    mutant(
        "memory-pools-take-all",
        "llamacpp/memory.py",
        "plan.slots * plan.slot_bytes - reserve",
        "plan.slots * plan.slot_bytes",
        "test_gpu_layers.py::test_pools_leave_room_for_libraries_whatever_the_memory",
    ),
    mutant(
        "memory-caches-not-counted",
        "llamacpp/memory.py",
        "caches[layer] += size / len(layers)",
        "caches[layer] += 0.0",
        "test_offload_llamacpp.py::test_float32_caches_are_counted",
    ),
    # Saved sessions.
    mutant(
        "saved-damage-unseen",
        "saved.py",
        "if checksum != saved.checksum:",
        "if checksum < 0:",
        "test_saved.py::TestFiles::test_what_is_cut_or_changed_anywhere_is_refused",
    ),
    mutant(
        "saved-of-another-model",
        "saved.py",
        "if was != is_:",
        'if was != is_ and name != "weights":',
        "test_saved.py::TestFiles::test_another_model",
    ),
    mutant(
        "saved-prompt-counts-as-written",
        "shapes.py",
        'return cls(details.get("read", 0)',
        "return cls(0",
        "test_pool.py::test_the_next_program_starts_from_what_was_saved",
    ),
    # Passes that agree to the bit.
    mutant(
        "exact-padding-rounded-down",
        "shapes.py",
        "-(-count // self.step) * self.step",
        "count // self.step * self.step",
        "test_exact.py::test_passes_are_padded_to_multiples",
    ),
    mutant(
        "exact-short-and-long-mixed",
        "shapes.py",
        "length = min(self.tokens, length) if short == self.short else 0",
        "length = min(self.tokens, length)",
        "test_exact.py::test_short_prompts_have_a_class_of_their_own",
    ),
    mutant(
        "exact-within-a-block",
        "shapes.py",
        "length - length % exact.prompts.most if exact.blocks else length",
        "length",
        "test_exact.py::test_blocks_of_a_prompt",
    ),
    mutant(
        "exact-other-rows-ignored",
        "exact.py",
        "if tried.trees and tried.row_independent and",
        "if tried.trees and",
        "test_exact.py::test_a_class_without_room_for_a_tree_is_none",
    ),
    mutant(
        "exact-written-counts-as-prompt",
        "shapes.py",
        "if self.reading and self.tokens == length:",
        "if self.tokens == length:",
        "test_exact.py::test_what_was_written_is_read_again",
    ),
]


class WrongTable(Exception):
    """A mutant that is not one."""


def sources(root: Path) -> list[Path]:
    return [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]


def place_of(one: Mutant, root: Path) -> Path:
    """The file that has the text. Raises WrongTable."""
    found = [path for path in sources(root) if one.old in path.read_text()]
    named = [path for path in found if path.as_posix().endswith(f"/{one.hint}")] if len(found) > 1 else found
    if len(named) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found) or "no file"
        raise WrongTable(f"{one.name}: {one.old!r} must stand in one file, but stands in {where}")
    if named[0].read_text().count(one.old) != 1:
        raise WrongTable(f"{one.name}: {one.old!r} stands in {named[0].relative_to(root)} more than once")
    return named[0]


def check(table: Sequence[Mutant]) -> list[str]:
    """What is wrong with it."""
    names, wrong = [one.name for one in table], list[str]()
    wrong += [f"{name}: two have this name" for name in sorted(set(names)) if names.count(name) > 1]
    for one in table:
        try:
            place_of(one, ROOT)
        except WrongTable as error:
            wrong.append(str(error))
        missing = [test for test in one.tests if not (ROOT / "tests" / test.partition("::")[0]).is_file()]
        wrong += [f"{one.name}: there is no tests/{test}" for test in missing]
        if not one.tests or one.old == one.new:
            wrong.append(f"{one.name}: needs a test, and a change")
    return wrong


def copy_to(root: Path) -> None:
    """The sources, so that `root` alone in the import path finds all packages."""
    for path in ROOT.iterdir():
        if path.name.startswith(".") or path.name in ("build", "dist") or path.suffix == ".egg-info":
            continue
        if path.is_dir():
            shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, root / path.name)
    project = tomllib.loads((root / "pyproject.toml").read_text())
    for package, folder in project["tool"]["setuptools"].get("package-dir", {}).items():
        place = root.joinpath(*package.split("."))
        if not place.exists():  # a package that lies outside of the one above it
            place.symlink_to(root / folder, target_is_directory=True)


@contextmanager
def mutated(one: Mutant, root: Path) -> Iterator[Path]:
    """Within it the copy has the mistake."""
    path = place_of(one, root)
    whole = path.read_text()
    path.write_text(whole.replace(one.old, one.new))
    with suppress(FileNotFoundError):
        Path(cache_from_source(str(path))).unlink()
    try:
        yield path
    finally:
        path.write_text(whole)


@dataclass(eq=False)  # plugins are hashed
class Watch:
    """A plugin of pytest: what happened."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # not even collected

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report.nodeid)


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    verdict: str  # caught, SURVIVED or DID NOT RUN
    about: str  # the first test that failed, or why nothing is known
    seconds: float
    output: str


def in_child(root: Path, tests: Sequence[str], changed: Path | None) -> tuple[str, str]:
    """Run tests on the copy: the verdict, and what is to say of it. The process is of no use afterwards."""
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)  # of the processes that tests start
    if changed:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() != ROOT / "tests")]
    watch, options = Watch(), ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
    if find_spec("hypothesis"):
        from hypothesis import Phase, settings

        # What is caught is caught again, and by any example: nobody reads it.
        settings.register_profile("mutants", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
        options.append("--hypothesis-profile=mutants")
    status = pytest.main([*options, *(f"tests/{test}" for test in tests)], plugins=[watch])
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "edgespec"]
    files = {Path(module.__file__).resolve() for module in modules if getattr(module, "__file__", None)}
    if strangers := sorted(str(file) for file in files if not file.is_relative_to(root)):
        return "DID NOT RUN", f"not the copy was imported, but {strangers[0]}"
    if watch.broken:
        return "DID NOT RUN", f"{watch.broken[0]} cannot be collected"
    if status == pytest.ExitCode.OK and not watch.passed:
        return "DID NOT RUN", "every test was skipped"
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return "DID NOT RUN", f"pytest ended with {int(status)}"
    if changed and changed.resolve() not in files:
        return "DID NOT RUN", f"{changed.relative_to(root)} was not imported, or cannot be"
    return ("caught", watch.failed[0]) if watch.failed else ("SURVIVED", f"{watch.passed} passed")


def run(root: Path, tests: Sequence[str], changed: Path | None = None) -> Outcome:
    """The same in a process of its own."""
    started, log, result = monotonic(), root / "output.log", root / "result.json"
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            result.write_text(json.dumps(in_child(root, tests, changed)))
            sys.stdout.flush()
        finally:
            os._exit(0)
    ended = 0
    while not ended and monotonic() - started < LIMIT:
        ended, _ = os.waitpid(child, os.WNOHANG)
        sleep(0 if ended else 0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what its tests have left
    if not ended:
        os.waitpid(child, 0)
    verdict, about = "DID NOT RUN", "it did not end" if not ended else "its process died"
    if result.exists():
        verdict, about = json.loads(result.read_text())
    return Outcome(verdict, about, monotonic() - started, log.read_text(errors="replace"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the tests notice these mistakes?")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants, or what names begin with; default: all")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    parser.add_argument("--all-tests", action="store_true", help="run all tests on each, not only those named")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the named tests without a mutant first")
    parser.add_argument("--verbose", action="store_true", help="show the output of tests for all that is not caught")
    asked = parser.parse_args()
    chosen = [one for one in MUTANTS if not asked.names or one.name.startswith(tuple(asked.names))]
    unknown = [name for name in asked.names if not any(one.name.startswith(name) for one in MUTANTS)]
    if wrong := [*check(MUTANTS), *(f"{name}: no mutant's name begins so" for name in unknown)]:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    if asked.list:
        for one in chosen:
            print(f"{one.name:32} {place_of(one, ROOT).relative_to(ROOT)}: {one.old}  ->  {one.new}")
        return 0
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    assert "edgespec" not in sys.modules
    started, counts = monotonic(), dict.fromkeys(("caught", "SURVIVED", "DID NOT RUN"), 0)
    with TemporaryDirectory(prefix="edgespec-mutants-") as folder:
        root = Path(folder).resolve()
        copy_to(root)
        if not (asked.no_baseline or asked.all_tests):
            found = run(root, list(dict.fromkeys(test for one in chosen for test in one.tests)))
            print(f"without a mutant: {found.about} ({found.seconds:.0f} s)", flush=True)
            if found.verdict != "SURVIVED":
                print(found.output, file=sys.stderr)
                return 1
        for one in chosen:
            with mutated(one, root) as changed:
                found = run(root, [""] if asked.all_tests else one.tests, changed)
            counts[found.verdict] += 1
            print(f"{found.verdict:12} {one.name:32} {found.seconds:6.1f} s  {found.about}", flush=True)
            if asked.verbose and found.verdict != "caught":
                print(found.output)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"({monotonic() - started:.0f} s)")
    return int(counts["caught"] < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
