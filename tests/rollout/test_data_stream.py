"""PromptData in a RolloutStream: a run that ends anywhere and continues trains each row once, in the data's order."""

import json
import pickle

import pytest
from rollout_helpers import BigramEngine, Toy, update

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers import DataError, PromptData, RolloutManager, RolloutStream, SampleBuffer, SamplingParams, open_rows
from workers.data.rollout_data import group_numbers

B, SAMPLES, BATCHES = 3, 2, 6
HOW = SamplingParams(5, temperature=0.8)
ROWS = 30


def prompt(number):
    """Token ids that tell the row's number."""
    return [3 + number // 29, 3 + number % 29]


@pytest.fixture
def path(tmp_path):
    """Rows of which every seventh is bad and every fifth too long."""
    lines = []
    for number in range(ROWS):
        row = {"prompt": prompt(number) + [5] * 9 * (number % 5 == 0), "label": number}
        lines.append("{" if number % 7 == 0 else json.dumps(row))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return tmp_path / "a.jsonl"


def opened(path):
    return PromptData(open_rows(path, seed=3, on_bad_row="skip"), B, label_key="label", max_prompt_len=5)


def reward(prompt_ids, completion_ids, label):
    if list(prompt_ids) != prompt(label):
        raise ValueError(f"the label {label} is not that of {prompt_ids}")
    return label + sum(completion_ids) % 8 / 10


class Run:
    """A run from a state, as tutorials/train_grpo.py has it."""

    def __init__(self, group, path, order, state=None, dynamic=False):
        self.data, self.manager = opened(path), RolloutManager(group, HOW, reward, samples_per_prompt=SAMPLES, seed=7)
        buffer = SampleBuffer(B, max_staleness=2, order=order, num_batches=BATCHES, max_filtered=4 * B)
        self.next = 0
        if state is not None:
            self.data.load_state_dict(state["data"])
            self.next = state["next"]
        self.stream = RolloutStream(self.manager, self.data, buffer, update_mode="interrupt", dynamic_sampling=dynamic)
        if state is not None:
            self.stream.load_state_dict(state["stream"])
            self.manager.weight_version = state["version"]

    def train(self, batches):
        """The group numbers and the rows of some batches."""
        trained = []
        for _ in range(batches):
            update(self.stream, self.manager, (self.manager.weight_version or 0) + 1)
            batch = self.stream.take(60)
            numbers = group_numbers(batch["group_ids"]).tolist()
            trained += list(zip(numbers, batch["rewards"].floor().int().tolist(), strict=True))[::SAMPLES]
            self.next += 1
        return trained

    def state(self):
        state = {"stream": self.stream.state_dict(), "data": self.data.state_dict(self.next - 1)}
        state |= {"next": self.next, "version": self.manager.weight_version}
        return pickle.loads(pickle.dumps(state))


OTHERS = [pytest.param(*pair, marks=pytest.mark.full("runs that end, with the other pairs of options"))
          for pair in (("fifo", True), ("window", False))]  # fmt: skip


@pytest.mark.parametrize(("order", "dynamic"), [("fifo", False), ("window", True), *OTHERS])
def test_each_row_is_trained_once_however_often_the_run_ends(path, order, dynamic):
    expected = opened(path)
    rows = [label for rollout_id in range(8 * BATCHES) for label in expected(rollout_id)[1]["label"]]
    trained, state = [], None
    for batches in (1, 3, 2):
        with LocalWorkerGroup(2, RayClassWithInitArgs(Toy, BigramEngine, delay=0.0005), threads=True) as group:
            run = Run(group, path, order, state, dynamic)
            trained += run.train(batches)
            state = run.state()
            run.stream.close()
    numbers = [number for number, _ in trained]
    assert len(set(numbers)) == len(numbers) == B * BATCHES
    assert all(label == rows[number] for number, label in trained)
    if not dynamic:  # it leaves groups with equal rewards out, and takes further rows instead
        assert sorted(numbers) == list(range(B * BATCHES))
    if order == "fifo":
        assert numbers == sorted(numbers)


def test_bad_row_ends_the_stream_with_its_error(path):
    data = PromptData(open_rows(path, shuffle=False), B)
    with LocalWorkerGroup(1, RayClassWithInitArgs(Toy, BigramEngine), threads=True) as group:
        manager = RolloutManager(group, HOW, samples_per_prompt=SAMPLES)
        with RolloutStream(manager, data, SampleBuffer(B)) as stream:
            update(stream, manager, 1)
            with pytest.raises(DataError, match=r"a.jsonl, line 1: not valid JSON"):
                stream.take(30)
