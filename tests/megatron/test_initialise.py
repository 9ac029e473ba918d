"""When and how megatron is initialized, and what the group knows of the layout before and after."""

import os
import signal

import pytest
from devices import ON_DEVICE
from megatron_workers import InConstructor, Lab, Replaceable, expert_coordinate, random_numbers, with_warnings

from single_controller import (
    DispatchError,
    NVMegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    StartError,
    WorkerDiedError,
    WorkerError,
    colocate,
)

SIZES = ("tp_size", "pp_size", "dp_size", "cp_size", "ep_size", "vpp_size")


def sizes(group):
    return tuple(getattr(group, size) for size in SIZES)


@pytest.fixture(scope="module")
def pair(ray_cluster):
    """Slots for two ranks."""
    with RayResourcePool([2], use_gpu=ON_DEVICE) as pool:
        yield pool


class TestInTheConstructor:
    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, pair):
        with RayWorkerGroup(pair, RayClassWithInitArgs(InConstructor, tp=2)) as group:
            yield group

    def test_sizes_are_known_at_once(self, group):
        assert sizes(group) == (2, 1, 1, 1, 1, 1)
        assert [group.layout.coordinate("tp", rank) for rank in range(2)] == [0, 1]

    def test_collecting_ranks_are_known_at_once(self, group):
        assert group.items(["x"]) == [("x", 0)]
        assert [seen["items"] for seen in group.seen()] == ["x", "x"]

    def test_code_written_for_gpus_runs(self, group):
        assert group.of_the_constructor() == [("gloo", "cpu", "cpu")] * 2

    def test_rank_is_not_replaced_alone(self, group):
        os.kill(group._transport.ranks[1].location.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            group.seen()
        with pytest.raises(StartError, match=r"MASTER_\w+ expected, but not set"):
            group.replace(timeout=60)


class TestReplacedRank:
    def test_parallelism_is_initialised_again(self, pair):
        """Once, for both roles of a process."""
        made = RayClassWithInitArgs(Replaceable, tp=2)
        with RayWorkerGroup(pair, colocate({"actor": made, "critic": made})) as both:
            group = both.actor
            before = group.process_id_and_sum()
            with pytest.raises(WorkerDiedError):
                group.process_id_and_sum(kill=0)
            assert group.replace() == (0,)
            after = both.critic.process_id_and_sum()
            assert [total for _, total in after] == [3, 3]
            assert after[1][0] == before[1][0] and after[0][0] != before[0][0]
            assert sizes(group) == sizes(both.critic) == (2, 1, 1, 1, 1, 1)


class TestInALaterMethod:
    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, pair):
        """A fresh group, in which torch.distributed is not initialized either. The first test does that."""
        with NVMegatronRayWorkerGroup(resource_pool=pair, ray_cls_with_init=RayClassWithInitArgs(cls=Lab)) as group:
            yield group

    def check_unknown(self, group):
        for size in SIZES:
            with pytest.raises(DispatchError, match="MegatronWorker"):
                getattr(group, size)
        for ask in (group.get_megatron_global_info, lambda: group.get_megatron_rank_info(0)):
            with pytest.raises(DispatchError, match="MegatronWorker"):
                ask()
        for call in (group.items, group.rows, group.stage_items, group.stage_rows):
            with pytest.raises(DispatchError, match=r"initializes Megatron") as caught:
                call([1, 2])
            assert caught.value.method in str(call)
        assert group.seen() == [{}, {}]
        assert not group.layout.known

    def test_layout_before_and_after(self, group):
        self.check_unknown(group)
        group.initialise_again(tensor_model_parallel_size=2, backend="nccl")
        assert group.items(["x"]) == [("x", 0)]
        assert sizes(group) == (2, 1, 1, 1, 1, 1)

    def test_by_hand_and_again_after_destroying(self, group):
        group.set_up_by_hand(pipeline_model_parallel_size=2)
        assert sizes(group) == (1, 2, 1, 1, 1, 1)
        assert group.items(["x"]) == [("x", 1)]
        group.seen()
        group.tear_down()
        self.check_unknown(group)
        group.set_up_by_hand()
        assert sizes(group) == (1, 1, 2, 1, 1, 1)
        assert group.items(["x", "y"]) == [("x", 0), ("y", 1)]

    def test_in_a_call_nobody_waits_for(self, group):
        group.tear_down()
        future = group.initialise_again.remote(tensor_model_parallel_size=2)
        assert group.items(["x"]) == [("x", 0)]
        future.result()

    def test_through_a_direct_handle(self, group):
        import ray

        group.tear_down()
        ray.get([worker.set_up.remote(1, 2) for worker in group.workers])
        assert group.pp_size == 2
        assert group.items(["x"]) == [("x", 1)]


class TestHelper:
    def test_returns_the_device(self, four):
        four.tear_down()
        assert [str(device) for device in four.initialise_again(tensor_model_parallel_size=2)] == ["cpu"] * 4
        assert (four.tp_size, four.dp_size) == (2, 2)

    def test_keywords_removed_from_this_megatron_are_ignored_with_a_warning(self, four):
        said = four.run(
            with_warnings, tensor_model_parallel_size=2, pipeline_model_parallel_split_rank=None, use_fp8=False
        )
        for (warning,) in said:
            assert "'pipeline_model_parallel_split_rank'" in warning and "'use_fp8'" in warning
        assert four.tp_size == 2

    def test_supported_keywords_are_passed_on_without_a_warning(self, four):
        said = four.run(with_warnings, context_parallel_size=2, order="cp-tp-ep-dp-pp", distributed_timeout_minutes=5)
        assert said == [[]] * 4
        assert (four.cp_size, four.dp_size) == (2, 2)

    @pytest.mark.parametrize(
        ("keyword", "meant"),
        [
            ("tensor_model_paralel_size", "tensor_model_parallel_size"),
            ("context_parallel_sizes", "context_parallel_size"),
            ("virtual_pipeline_model_parallel_sizes", "virtual_pipeline_model_parallel_size"),
            ("expert_model_parallel_siz", "expert_model_parallel_size"),
        ],
    )
    def test_misspelt_keyword_is_a_type_error(self, four, keyword, meant):
        four.tear_down()
        with pytest.raises(WorkerError, match=rf"no keyword '{keyword}'; did you mean '{meant}'\?") as caught:
            four.initialise_again(**{keyword: 2})
        assert isinstance(caught.value.__cause__, TypeError)
        with pytest.raises(DispatchError, match="MegatronWorker"):
            four.tp_size  # noqa: B018 - nothing was initialized

    def test_second_call_is_an_error_and_keeps_the_first_layout(self, four):
        four.set_up(2)
        with pytest.raises(WorkerError, match=r"RuntimeError.*already initialised"):
            four.initialise_again(tensor_model_parallel_size=4)
        assert four.tp_size == 2

    def test_sizes_that_do_not_divide_the_ranks(self, four):
        with pytest.raises(WorkerError, match=r"world_size \(4\) is not divisible by 3"):
            four.set_up(3)
        with pytest.raises(DispatchError):
            four.tp_size  # noqa: B018 - nothing was initialized
        four.set_up(4)
        assert four.tp_size == 4

    def test_direct_megatron_call_raises_megatrons_own_error(self, four):
        with pytest.raises(
            WorkerError, match="unexpected keyword argument 'pipeline_model_parallel_split_rank'"
        ) as caught:
            four.set_up_by_hand(tensor_model_parallel_size=2, pipeline_model_parallel_split_rank=None)
        assert isinstance(caught.value.__cause__, TypeError)


class TestSeeds:
    """(random, numpy, torch, megatron's tracker) by rank."""

    def test_replicas_start_alike_and_tp_ranks_differ_in_the_tracker(self, four):
        where = [place for place, _ in four.set_up(2, seed=5)]
        numbers = four.run(random_numbers)
        assert len({drawn[:3] for drawn in numbers}) == 1
        tracked = {}
        for place, drawn in zip(where, numbers, strict=True):
            tracked.setdefault(place["tp"], set()).add(drawn[3])
        assert all(len(by_replica) == 1 for by_replica in tracked.values())
        assert tracked[0] != tracked[1]

    def test_stages_differ(self, four):
        where = [place["pp"] for place, _ in four.set_up(1, 2, seed=5)]
        by_stage = {stage: set() for stage in (0, 1)}
        for stage, drawn in zip(where, four.run(random_numbers), strict=True):
            by_stage[stage].add(drawn)
        assert [len(by_replica) for by_replica in by_stage.values()] == [1, 1]
        (first,), (last,) = by_stage.values()
        assert all(a != b for a, b in zip(first, last, strict=True))

    def test_same_seed_gives_the_same_numbers(self, four):
        drawn = {}
        for turn, seed in enumerate([5, 6, 5]):
            four.set_up(2, seed=seed)
            drawn[turn] = four.run(random_numbers)
        assert drawn[0] == drawn[2]
        assert all(a != b for ranks in zip(drawn[0], drawn[1], strict=True) for a, b in zip(*ranks, strict=True))


class TestGroup:
    def test_plain_group_has_the_same_layout(self, four):
        """It is attached to the same workers, so both have the same ranks."""
        with RayWorkerGroup.from_detached(worker_handles=four.workers) as plain:
            for tp, pp in [(2, 1), (1, 2), (4, 1), (2, 2)]:
                four.set_up(tp, pp)
                plain.seen()  # a group learns of a new layout from the results of its own calls
                assert sizes(plain) == sizes(four) == (tp, pp, 4 // tp // pp, 1, 1, 1)
                assert plain.layout == four.layout
                assert plain.items(["x"] * plain.dp_size) == four.items(["x"] * four.dp_size)
            assert type(plain) is RayWorkerGroup and not hasattr(plain, "get_megatron_rank_info")

    def test_invalid_ranks(self, four):
        four.set_up()
        for rank in (4, -1, "0", None, 1.0):
            with pytest.raises(IndexError, match="0 to 3"):
                four.get_megatron_rank_info(rank)

    def test_virtual_stages(self, four):
        four.set_up(2, 2, virtual_pipeline_model_parallel_size=3)
        assert sizes(four) == (2, 2, 1, 1, 1, 3)
        assert four.items(["x"])[0][0] == "x"
        four.set_up(2, 2)
        assert four.vpp_size == 1

    def test_expert_parallelism(self, four):
        four.set_up(expert_model_parallel_size=2)
        places = four.run(expert_coordinate)
        assert {size for _, size in places} == {2}
        assert sizes(four) == (1, 1, 4, 1, 2, 1)
        assert four.layout.axes["ep"] == tuple(rank for rank, _ in places)
        assert sorted(rank for rank, _ in places) == [0, 0, 1, 1]
        assert [item for item, _ in four.items(list("abcd"))] == list("abcd")
        four.set_up()
        assert four.ep_size == 1 and "ep" not in four.layout.axes
