"""The column ``routed_experts``: its checks, and its way to the micro-batches."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from dispatch import jagged
from dispatch.batch import cut, join
from workers.data.balance import Balance, balanced_rows
from workers.data.micro_batches import cut_by_tokens
from workers.data.rollout_data import RolloutDataError, check_rollout_data, rows_of
from workers.data.routed_experts import RoutingShape
from workers.hf_files import config_from
from workers.train.args import TrainArgsError, read_args
from workers.train.policy_worker import PolicyTrainWorker, _mean, check_entries
from workers.train.train_model import StepReport

MODEL = {"model_type": "qwen3_moe", "vocab_size": 99, "hidden_size": 8, "num_hidden_layers": 3, "num_experts": 6}
MODEL |= {"num_experts_per_tok": 2, "mlp_only_layers": [1], "num_attention_heads": 2, "num_key_value_heads": 2}
LENGTHS = [5, 3, 9, 9]


def routes_of(row, length):
    """Experts that say whose they are: no two tokens of a row have the same ones."""
    generator = torch.Generator().manual_seed(row)
    chosen = torch.rand(length, 3, 6, generator=generator).argsort(-1)[..., :2].short()
    chosen[:, 1] = 0  # a layer without experts
    return chosen


def rows(lengths=LENGTHS, routes=None):
    width, count = max(lengths) + 1, len(lengths)
    mask = torch.zeros(count, width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, 1 : 1 + length] = 1
    ids = (torch.arange(count * width).view(count, width) * 7) % 99
    of_rows = routes or [routes_of(row, length) for row, length in enumerate(lengths)]
    column = torch.nested.as_nested_tensor(of_rows, layout=torch.jagged)
    loss_mask = mask.clone()
    loss_mask[:, :3] = 0
    data = {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask, "routed_experts": column}
    return TensorDict({**data, "rewards": torch.arange(float(count)), "row": torch.arange(count)}, [count])


def check(data, model=MODEL):
    check_rollout_data(data, 99, RoutingShape.of(config_from(model)))


def with_routes(change):
    of_rows = [routes_of(row, length) for row, length in enumerate(LENGTHS)]
    return rows(routes=change(of_rows))


def put(row, token, layer, experts):
    def change(of_rows):
        of_rows[row][token, layer] = torch.tensor(experts, dtype=torch.int16)
        return of_rows

    return change


def test_shapes_of_models():
    assert RoutingShape.of(config_from(MODEL)) == RoutingShape(3, 6, 2, (0, 2))
    assert RoutingShape.of(config_from({"model_type": "llama", "vocab_size": 9})) is None
    mixtral = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    assert RoutingShape.of(config_from(mixtral)) == RoutingShape(2, 4, 1, (0, 1))
    deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    assert RoutingShape.of(config_from({**deepseek, "first_k_dense_replace": 3})).sparse == (3,)


def test_what_is_valid():
    check(rows())
    check(with_routes(put(2, 8, 2, [-1, -1])))
    check(with_routes(put(2, 8, 1, [500, 500])))  # a layer without experts
    check(rows()[:0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda of: [*of[:2], of[2][:-1], of[3]], "of row 2 has 8 tokens, but its attention_mask 9"),
        (lambda of: [*of[:1], torch.cat([of[1], of[1]]), *of[2:]], "of row 1 has 6 tokens"),
        (lambda of: [one[:, :2] for one in of], "has 2 layers and 2 experts per token; the model has 3 hidden layers"),
        (lambda of: [one[..., :1] for one in of], "has 3 layers and 1 experts per token"),
        (put(3, 4, 2, [1, 6]), r"of row 3 has the experts \[1, 6\] at its token 4 in layer 2; .* below 6"),
        (put(1, 2, 0, [-2, 3]), r"of row 1 has the experts \[-2, 3\] at its token 2 in layer 0; .* from 0"),
        (put(0, 0, 0, [3, 3]), r"of row 0 has the experts \[3, 3\] at its token 0 in layer 0; .* once"),
        (put(2, 1, 2, [-1, 3]), r"of row 2 .* token 1 in layer 2; -1 leaves the choice .* all 2 places"),
        (lambda of: [one.int() for one in of], "expected a jagged int16 tensor"),
        (lambda of: [one.flatten(1) for one in of], "expected a jagged int16 tensor"),
    ],
)
def test_what_is_refused(change, says):
    with pytest.raises(RolloutDataError, match=f"routed_experts .*{says}"):
        check(with_routes(change))


def test_padded_column_is_refused():
    data = rows()
    data["routed_experts"] = torch.zeros(4, 10, 3, 2, dtype=torch.int16)
    with pytest.raises(RolloutDataError, match="expected a jagged int16 tensor"):
        check(data)


def test_driver_checks_the_column_that_is_replayed():
    wrong, args = with_routes(put(3, 4, 2, [1, 6])), {"hf_config": MODEL, "advantage_estimator": "reinforce_plus_plus"}
    for role, replay in (("actor", None), ("actor", "R2"), ("critic", "R3")):  # they do not read it
        PolicyTrainWorker.check_rows(read_args({**args, "routing_replay": replay}), wrong, role, ())
    args = read_args({**args, "use_rollout_routing_replay": True})
    with pytest.raises(RolloutDataError, match="of row 3"):
        PolicyTrainWorker.check_rows(args, wrong, "actor", ())
    with pytest.raises(RolloutDataError, match=r"'R3' needs 'routed_experts'.*return_routed_experts=True"):
        check_entries(set(wrong.keys()) - {"routed_experts"}, args, "actor")


def test_arguments():
    assert read_args({"use_routing_replay": True}).routing_replay == "R2"
    both = read_args({"use_routing_replay": True, "use_rollout_routing_replay": True})
    assert both.routing_replay == "R3" == read_args(both).routing_replay
    with pytest.raises(TrainArgsError, match="routing_replay='R3' and use_routing_replay=True"):
        read_args({"routing_replay": "R3", "use_routing_replay": True})
    for name in ("use_rollout_logprobs", "keep_old_actor"):
        read_args({"routing_replay": "R3", name: True})
        with pytest.raises(TrainArgsError, match=f"'R2' does not go with {name}"):
            read_args({"routing_replay": "R2", name: True})


def assert_own_routes(data):
    """Each row has the experts that it had at first."""
    column, lengths = jagged.compact(data["routed_experts"], {}), data["attention_mask"].sum(1).tolist()
    for row, (number, length) in enumerate(zip(data["row"].tolist(), lengths, strict=True)):
        begin, end = column.offsets()[row : row + 2]
        assert end - begin == length and torch.equal(column.values()[begin:end], routes_of(number, LENGTHS[number]))


def test_dispatch_and_balance_keep_rows_and_routes_together():
    data = rows()
    shards = [cut(data, *ends) for ends in ((0, 1), (1, 1), (1, 4))]
    assert [len(shard) for shard in shards] == [1, 0, 3]
    for shard in shards:
        assert_own_routes(shard)
    assert_own_routes(join(shards[::-1]))
    assert_own_routes(rows_of(data, [3, 0, 2]))
    for trees in (False, True):
        balanced = balanced_rows(data, Balance(2, trees=trees))
        assert balanced["row"].tolist() != [0, 1, 2, 3]
        assert_own_routes(balanced)
    assert_own_routes(pickle.loads(pickle.dumps(data)))


def test_disk_keeps_the_column(tmp_path):
    torch.save(rows(), tmp_path / "rows.pt")
    assert_own_routes(torch.load(tmp_path / "rows.pt", weights_only=False))


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_have_the_routes_of_each_token_that_is_computed(packed):
    data, seen = rows(), {row: 0 for row in range(4)}
    parts = cut_by_tokens(data, 18, at_least=4, packed=packed)
    assert [part.is_filler for part in parts].count(True) and len(parts) == 4
    for part in parts:
        assert "routed_experts" not in part.others and len(part.routed_experts) == part.computed
        if part.is_filler:
            assert (part.routed_experts == -1).all()
            continue
        tokens, width = part.packed.owners if packed else torch.arange(part.computed), part.input_ids.shape[1]
        for of_token, place in zip(part.routed_experts, tokens.tolist(), strict=True):
            row, column = int(part.rows[place // width]), place % width
            if column < LENGTHS[row]:
                assert torch.equal(of_token, routes_of(row, LENGTHS[row])[column])
                seen[row] += 1
            else:
                assert (of_token == -1).all()
    assert list(seen.values()) == LENGTHS


def test_packed_rows_share_tokens_with_equal_routes_only():
    lengths = [12, 12, 12]
    routes = [routes_of(0, 12) for _ in lengths]
    routes[2] = routes[2].clone()
    routes[2][9, 2] = torch.tensor([4, 5])
    data = rows(lengths, routes)
    data["input_ids"][:] = data["input_ids"][0]
    (part,) = cut_by_tokens(data, 99, packed=True)
    assert part.computed == 12 + 3  # the third row divides at its token 9
    for row in range(3):
        at = part.packed.places[row].clone()
        at[0] = 0
        order = part.rows.tolist()
        assert torch.equal(part.routed_experts[at], routes[order[row]])


def test_share_is_the_mean_over_the_steps_that_have_it():
    """No token of the second step has experts to replay."""
    reports = [StepReport({"loss": 1.0, "replay/overlap": 0.75}, 2.0), StepReport({"loss": 2.0}, 4.0)]
    assert _mean(reports, 0.5) == {"loss": 1.5, "replay/overlap": 0.75, "grad_norm": 3.0, "lr": 0.5}
    assert _mean([]) == {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0}
