"""Sparse attention on PyTorch: which cells a target reads by its draft's attention, and what is refused."""

import itertools
from functools import partial
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[torch]'")

from contract import random_tokens
from edgespec.backends.torch.attention import Part, Tree, build_mask, tree_attention
from edgespec.backends.torch.backend import load
from hf_models import save, tiny_model, torch

import edgespec
from edgespec.errors import UsageError
from edgespec.lab import sparse_attention
from edgespec.lab.sparse_attention import attention, follow, heaviest, least_in_order
from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.loop.tree import ancestor_mask, depths

LENGTH = 40
TREE = [-1, 0, 0, 1, 1, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    return str(save(tiny_model("llama", num_hidden_layers=5), target)), str(save(tiny_model("llama", seed=1), draft))


@pytest.fixture
def pair(folders):
    loaded = [load(folder, context_length=600, budget=16, sessions=2, threads=1) for folder in folders]
    yield loaded
    for backend in loaded:
        backend.close()


def rows_of_a_tree(target, draft, seed=3):
    """Logits of a tree after a text, and the cells read; the draft has read the text of `seed` up to a root."""
    text = random_tokens(target, LENGTH + 1, 3)
    session, reader = target.open(), draft.open()
    prefill(target, session, text[:-1])
    if seed:
        prefill(draft, reader, random_tokens(target, LENGTH + 1, seed), want_last=True)
    work = Work(
        session, np.array([text[-1], 5, 6, 7, 8, 9], np.int32), np.array(TREE, np.int32), np.arange(6, dtype=np.int32)
    )
    chosen = target.choose_cells(session, work, LENGTH + 6, target.device) if target.choose_cells else {}
    [logits] = target.forward([work])
    rows = np.array([logits.row(node) for node in range(6)])
    session.close()
    reader.close()
    return rows, chosen


class TestCells:
    def test_with_the_whole_share_rows_are_the_dense_ones_to_the_bit(self, pair):
        dense, _ = rows_of_a_tree(*pair)
        follow(*pair, 1.0, False, print)
        rows, chosen = rows_of_a_tree(*pair)
        assert all(len(cells) == LENGTH + 6 for cells in chosen.values())
        np.testing.assert_array_equal(rows, dense)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("rows", [1, 6])
    def test_gathered_cells_give_what_masked_attention_gives(self, rows):
        generator, end = torch.Generator().manual_seed(2), LENGTH + rows
        query, key, value, cells = (
            torch.randn(shape, generator=generator)
            for shape in [(1, 4, rows, 8), (1, 2, rows, 8), (1, 2, rows, 8), (2, 2, end, 8)]
        )
        chosen = torch.tensor([0, 3, 17, 30, *range(LENGTH, end)])
        _, mask = build_mask(ancestor_mask(TREE[:rows]), depths(TREE[:rows]), LENGTH, None, torch.float32, "cpu")
        masked = torch.full((rows, end), -torch.inf)
        masked[:, chosen] = 0.0 if mask is None else mask[:, chosen]

        def attend(mask, chosen):
            part = Part(slice(0, rows), slice(0, rows), {0: cells.clone()}, LENGTH, end, {None: (0, mask)}, chosen)
            tree = Tree((part,), (None,), Event())
            return tree_attention(SimpleNamespace(layer_idx=0), query, key, value, None, tree=tree)[0]

        torch.testing.assert_close(attend(mask, {0: chosen}), attend(masked, {}))
        assert not torch.allclose(attend(mask, {0: chosen}), attend(mask, {}))

    @pytest.mark.exhaustive
    def test_nodes_of_the_tree_are_always_read(self, pair):
        follow(*pair, 0.01, False, print)
        rows, chosen = rows_of_a_tree(*pair)
        for cells in chosen.values():
            assert cells.tolist()[-6:] == list(range(LENGTH, LENGTH + 6))
            assert len(cells) < LENGTH / 2
        assert np.isfinite(rows).all()

    def test_cells_are_the_fewest_that_hold_the_share(self):
        weights = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
        assert heaviest(weights, 0.69).tolist() == [1, 3]
        assert heaviest(weights, 0.75).tolist() == [1, 3, 4]
        assert heaviest(torch.tensor([1.0, 0.0, 1e-12]), 1.0).tolist() == [0, 1, 2]

    def test_attention_is_the_mean_of_the_softmax_of_all_heads(self):
        generator = torch.Generator().manual_seed(1)
        queries, keys = torch.randn(4, 3, 8, generator=generator), torch.randn(2, 10, 8, generator=generator)
        expected = torch.zeros(3, 10)
        for head, row in itertools.product(range(4), range(3)):
            seen = 8 + row  # the rows are the last three
            expected[row, :seen] += torch.softmax(keys[head // 2, :seen] @ queries[head, row], 0) / 4
        torch.testing.assert_close(attention(queries, keys), expected)

    @pytest.mark.parametrize("seed", [None, 4])
    def test_all_is_read_where_the_draft_has_read_nothing_or_another_text(self, pair, seed):
        target, draft = pair
        dense, _ = rows_of_a_tree(target, draft)
        follow(target, draft, 0.5, False, print)
        rows, chosen = rows_of_a_tree(target, draft, seed)
        assert chosen == {}
        np.testing.assert_array_equal(rows, dense)

    @pytest.mark.exhaustive
    def test_queries_of_tokens_that_were_dropped_are_not_used(self, pair):
        target, draft = pair
        follow(target, draft, 0.5, False, print)
        session = draft.open()
        text = random_tokens(draft, 12, 5)
        prefill(draft, session, text)
        assert session.queries
        session.rewind(10)
        assert not session.queries
        prefill(draft, session, text)
        parents = np.array([-1, 0, 0], np.int32)
        draft.forward([Work(session, np.array([5, 6, 7], np.int32), parents, parents[:0])])
        session.commit([0, 1])  # node 2 was the last of the pass
        assert not session.queries


class TestMap:
    def test_layers_are_in_order_and_cost_least_in_all(self):
        costs = np.random.default_rng(4).random((5, 4))
        found = least_in_order(costs)
        every = list(itertools.combinations_with_replacement(range(4), 5))
        assert found == list(min(every, key=lambda layers: sum(costs[i, j] for i, j in enumerate(layers))))

    def test_a_hand_made_matrix(self):
        assert least_in_order([[0, 9, 9], [9, 9, 1], [9, 0, 2]]) == [0, 2, 2]

    @pytest.mark.exhaustive
    def test_a_model_is_mapped_to_itself_layer_by_layer(self, folders):
        pair = [load(folders[0], context_length=600, budget=16, sessions=1, threads=1) for _ in range(2)]
        follow(*pair, 0.9, False, print)
        assert pair[0].choose_cells.__self__._layers == [0, 1, 2, 3, 4]
        for backend in pair:
            backend.close()

    @pytest.mark.exhaustive
    def test_it_is_found_once_for_a_pair(self, pair, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("EDGESPEC_NO_MEMORY_OF_COSTS", raising=False)
        follow(*pair, 0.9, True, print)
        layers = pair[0].choose_cells.__self__._layers
        monkeypatch.setattr(sparse_attention, "layer_map", lambda *args: pytest.fail("found again"))
        follow(*pair, 0.8, True, print)
        assert pair[0].choose_cells.__self__._layers == layers


class TestTexts:
    def generate(self, folders, **options):
        with edgespec.load(
            folders[0], **{"draft": folders[1], "budget": 8, "planner": "specexec", "remember": False} | options,
            context_length=300, threads=1,
        ) as model:  # fmt: skip
            result = model.generate("to be or not to be, that is", max_tokens=24, temperature=0.8, seed=3)
            return result, model.where, model.target.identity

    @pytest.mark.exhaustive
    def test_the_same_seed_gives_the_same_text(self, folders):
        one, other = (self.generate(folders, approximate="sparse-attention:0.7")[0] for _ in range(2))
        assert one.token_ids == other.token_ids

    @pytest.mark.exhaustive
    def test_it_acts_and_changes_the_text(self, folders):
        dense, sparse = self.generate(folders)[0], self.generate(folders, approximate="sparse-attention:0.05")[0]
        assert sparse.token_ids != dense.token_ids

    @pytest.mark.exhaustive
    def test_a_second_answer_does_not_depend_on_how_the_first_was_computed(self, folders):
        options = {"backend": "torch", "context_length": 300, "threads": 1, "remember": False, "budget": 8}
        asked, longer, texts = {"max_tokens": 24, "temperature": 0.8, "seed": 3}, "", []
        for _ in range(2):
            with edgespec.load(
                folders[0], draft=folders[1], planner="specexec", approximate="sparse-attention:0.05", **options
            ) as model:
                if not longer:
                    longer = "to be or not to be, that is"
                    longer += model.generate(longer, **asked).text + " the question"
                texts.append(model.generate(longer, **asked).token_ids)
        assert texts[0] == texts[1]

    def test_they_are_marked_as_approximate(self, folders):
        result, where, identity = self.generate(folders, approximate="sparse-attention:0.7")
        assert result.stats.as_dict()["approximate"] == "sparse attention 0.7"
        assert "approximate: sparse attention 0.7" in result.stats.summary()
        assert "approximate (sparse attention 0.7)" in where.line
        assert not where.exact
        exact, where, other = self.generate(folders)
        assert exact.stats.approximate == ""
        assert "approximate" not in where.line
        assert identity != other  # a saved session of the one is not loaded by the other

    @pytest.mark.exhaustive
    def test_with_the_whole_share_the_text_is_that_of_plain_decoding(self, folders):
        whole = self.generate(folders, approximate="sparse-attention:1.0")[0]
        plain = self.generate(folders, draft=None, planner="none", budget=None)[0]
        assert whole.token_ids == plain.token_ids


class TestRefused:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"draft": None}, "--approximate sparse-attention needs a draft model of its own: name one with --draft"),
            ({"planner": "none"}, "the planner none does not go with --approximate sparse-attention"),
            ({"planner": "pearl"}, "the planner pearl does not go with --approximate sparse-attention"),
            ({"draft": "layers"}, "--approximate sparse-attention needs a draft model of its own, and layers is none"),
            ({"exact": "narrow"}, "--exact narrow asks for the text of plain decoding, --approximate sparse-attention"),
            ({"cascade": 0.5}, "sparse-attention:0.9 and cascade:0.5 are both approximate: give one of them"),
            (
                {"approximate": "sparse-attention:1.5"},
                "the value of approximate sparse-attention is '1.5', but must be",
            ),
            (
                {"approximate": "sparse-attention:0"},
                "the value of approximate sparse-attention is '0', but must be above",
            ),
            (
                {"approximate": "sparse"},
                "there is no approximate method 'sparse'; there are: cascade, sparse-attention",
            ),
            (
                {"backend": "reference"},
                "--approximate sparse-attention needs both models on torch, and they are on ref",
            ),
            ({"ahead": True}, "ahead=True does not go with --approximate sparse-attention"),
            ({"targets": 2}, "several targets have no option 'approximate'"),
        ],
    )
    def test_what_does_not_go_with_it(self, folders, options, message):
        target, draft = folders
        with pytest.raises(UsageError) as error:
            edgespec.load(
                target, **{"draft": draft, "approximate": "sparse-attention:0.9", "backend": "torch"} | options
            )
        assert message in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("family", ["mistral, window", "lfm2"])
    @pytest.mark.parametrize("place", ["target", "draft"])
    def test_layers_that_do_not_attend_to_the_whole_text(self, folders, tmp_path, family, place):
        folder = save(tiny_model(family), tmp_path)
        make = partial(load, context_length=600, budget=16, threads=1)
        pair = [make(str(folder)), make(folders[0])]
        with pytest.raises(UsageError, match=f"the {place} has layers that do not attend to the whole text"):
            follow(*(pair if place == "target" else pair[::-1]), 0.9, True, print)
        for backend in pair:
            backend.close()

    def test_options_of_a_draft_have_none(self):
        assert LoadOptions(approximate="sparse-attention:0.9").for_draft().approximate is None
