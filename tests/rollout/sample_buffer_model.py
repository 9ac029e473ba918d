"""A plain reference of SampleBuffer, written from docs/internals/sample-buffer.md, with everything recomputed."""

import copy
import itertools
import pickle

from hypothesis import strategies as st

from workers import SampleBuffer


@st.composite
def settings_of_a_buffer(draw):
    how = {
        "groups_per_batch": draw(st.integers(1, 3)),
        "max_staleness": draw(st.integers(0, 2)),
        "on_stale": draw(st.sampled_from(["wait", "drop", "train"])),
        "order": draw(st.sampled_from(["fifo", "window"])),
        "update_interval": draw(st.integers(1, 2)),
        "num_batches": draw(st.integers(1, 8)),
        "max_filtered": draw(st.none() | st.integers(0, 3)),
        "keep_batches": draw(st.integers(0, 3)),
    }
    if how["order"] == "window":
        how["window"] = draw(st.integers(1, 8))
    return how


class Model:
    """What is known of each number. `updates` counts the updates with new weights in the whole history."""

    def __init__(self, groups_per_batch, *, num_batches, max_staleness=0, on_stale="wait", order="fifo", window=None,
                 update_interval=1, max_filtered=None, keep_batches=0):  # fmt: skip
        self.size, self.staleness, self.on_stale, self.order = groups_per_batch, max_staleness, on_stale, order
        self.window, self.interval = window or 2 * groups_per_batch, update_interval
        self.num_batches, self.limit = num_batches, float("inf") if max_filtered is None else max_filtered
        self.state, self.born, self.partial, self.journal = {}, {}, {}, {}
        self.flat, self.trained, self.dropped = {}, [], []
        self.updates, self.updated_at, self.sent_at = 1, 0, 0
        self.keep, self.kept, self.updates_when, self.rewound = keep_batches, set(), {}, False
        self.most, self.first = 0, 0
        """The largest number of batches, and the first batch that can be rewound."""

    @property
    def batches(self):
        return len(self.trained)

    def of(self, *states):
        return sorted(number for number, state in self.state.items() if state in states)

    def left(self):
        """All numbers that have begun and are neither trained nor filtered."""
        return self.of("pending", "flying", "ready")

    def updates_until(self, batch):
        """How many updates come between now and a batch, if they come when they should."""
        return sum(later % self.interval == 0 for later in range(self.updated_at + 1, batch + 1))

    def too_old(self, number, batch=None):
        if self.on_stale == "train" or self.born.get(number) is None:
            return False
        later = 0 if batch is None else self.updates_until(batch)
        return self.updates + later - self.born[number] > self.staleness

    def begin(self):
        number = min(self.of("pending"), default=len(self.state))
        batch = self.batches + sum(other < number for other in self.left()) // self.size
        if self.updates_until(batch) > self.staleness or batch >= self.num_batches:
            return None
        if self.too_old(number, batch):
            self.drop(number)
        self.state[number] = "flying"
        if self.born.get(number) is None:
            self.born[number] = self.updates
        self.journal[number] = self.partial.pop(number, None)
        return number, self.journal[number]

    def drop(self, number):
        if number in self.undecided():
            del self.flat[number]
        self.state[number], self.born[number] = "pending", None
        self.partial.pop(number, None)
        self.dropped.append(number)

    def arrive(self, number, born, flat):
        self.state[number], self.born[number] = "ready", born
        self.journal.pop(number, None)
        if number not in self.decided():
            self.flat[number] = flat and self.flat.get(number, True)
        for other in self.filtered():
            if self.state[other] == "ready":
                self.state[other] = "filtered"
        if self.state[number] == "ready" and self.too_old(number):
            self.drop(number)

    def decided(self):
        """The numbers up to the first that has never arrived -> whether they are filtered."""
        found, kept, filtered = {}, 0, 0
        for number in itertools.takewhile(self.flat.__contains__, itertools.count()):
            found[number] = self.flat[number] and filtered < self.limit
            filtered += found[number]
            kept += not found[number]
            if not found[number] and kept % self.size == 0:
                filtered = 0
        self.open_filtered = filtered
        return found

    def filtered(self):
        """The numbers of which it is certain that they are filtered."""
        found = self.decided()
        certain = [number for number, is_filtered in found.items() if is_filtered]
        for number in range(len(found), max(self.flat, default=-1) + 1):
            lower = [other for other in range(len(found), number) if self.flat.get(other, True)]
            if self.flat.get(number) and self.open_filtered + len(lower) < self.limit:
                certain.append(number)
        return certain

    def undecided(self):
        decided = self.decided()
        return [n for n in self.of("ready") if self.flat.get(n) and n not in decided]

    def give_back(self, number, partial):
        self.journal.pop(number, None)
        if self.too_old(number):
            self.drop(number)
            return
        self.state[number] = "pending"
        if partial is None:
            self.born[number] = None
        else:
            self.partial[number] = partial

    def take(self):
        """The numbers of the next batch, or None."""
        undecided = self.undecided()
        good = [number for number in self.of("ready") if number not in undecided]
        lowest = self.left()[: self.size]
        unready = [number for number in self.left() if number not in good]
        if unready and self.order == "fifo":
            good = [number for number in good if number < unready[0]]
        elif unready:
            good = [number for number in good if number < unready[0] + self.window]
        chosen = good[: self.size]
        if len(chosen) < self.size:
            return None
        if self.on_stale == "wait" and chosen != lowest:
            # The lowest ready ones may be taken if any choice may.
            possible = [some for some in itertools.combinations(good, self.size) if self.in_time_without(some)]
            if not possible:
                return None
        return chosen

    def in_time_without(self, chosen):
        left = [number for number in self.left() if number not in chosen]
        return not any(self.too_old(n, self.batches + 1 + place // self.size) for place, n in enumerate(left))

    def note_taken(self, numbers):
        for number in numbers:
            self.state[number] = "trained"
        self.updates_when[self.batches] = self.updates
        self.kept = {*self.kept - {self.batches - self.keep}, *([self.batches] if self.keep else [])}
        self.trained.append(numbers)
        self.most, self.rewound = max(self.most, self.batches), False

    def rewind(self, batch):
        """The trainer has gone back, and so have the updates of its weights."""
        for number in range(batch, self.batches):
            for group in self.trained[number]:
                self.state[group] = "ready" if number in self.kept else "pending"
                self.born[group] = self.born[group] if number in self.kept else None
        del self.trained[batch:]
        self.kept = {number for number in self.kept if number < batch}
        self.updates, self.updated_at, self.rewound = self.updates_when[batch], batch, True
        self.sent_at = batch

    def update(self):
        if self.rewound:  # the same weights again
            return
        self.updates += 1
        self.updated_at = self.sent_at = self.batches
        for number in self.of("pending", "ready"):
            if self.too_old(number):
                self.drop(number)

    def after_resume(self, lost):
        for number in [*self.of("flying"), *lost]:
            self.state[number] = "pending"
            self.partial.pop(number, None)
            if (known := self.journal.pop(number, None)) is not None:
                self.partial[number] = known
            else:
                self.born[number] = None
        self.first, self.kept = self.batches, set()


class History:
    """Drives a buffer and the model with the same random events, and asserts after each that they agree."""

    def __init__(self, how, draw, regular):
        self.how, self.draw, self.regular = how, draw, regular
        self.buffer, self.model = SampleBuffer(**how), Model(**how)
        self.version, self.updates_at = 1, {1: 1}
        """Version -> `Model.updates`: what a worker with this version generates is of these weights."""
        self.buffer.set_version(1)
        self.flying = {}
        """number -> the version of its oldest token."""
        self.saved = None
        self.dropped = 0

    def step(self):
        events = [self.begin, self.begin, self.put, self.put, self.put, self.give_back, self.take, self.take]
        events += [self.update, self.send_again, self.save, self.resume, self.abort_expired, self.rewind, self.journal]
        self.draw.choice(events)()
        self.check()

    def check(self):
        model, counts = self.model, self.buffer.metrics()
        now = {"pending": "pending", "in_flight": "flying", "ready": "ready"}
        assert {name: counts[f"buffer/{name}"] for name in now} == {n: len(model.of(s)) for n, s in now.items()}
        assert sorted(self.flying) == model.of("flying")
        self.dropped += counts["buffer/dropped"]
        assert self.dropped == len(model.dropped)
        # Bounded, and each prompt is in exactly one place.
        again = model.most - model.batches
        assert len(model.left()) <= model.size * (model.interval * (model.staleness + 1) + again)
        trained = [number for batch in model.trained for number in batch]
        assert len(trained) == len(set(trained)) and sorted(trained) == model.of("trained")
        assert sorted(model.state) == list(range(len(model.state)))
        if model.order == "fifo":
            assert trained == sorted(trained)
        if model.on_stale == "wait" and self.regular:
            assert not model.dropped and not self.buffer.expired()
        expected = [n for n in model.of("flying") if model.too_old(n)]
        assert self.buffer.expired() == expected

    def begin(self):
        begun, expected = self.buffer.begin(), self.model.begin()
        assert begun == expected
        if begun is not None:
            self.flying[begun.number] = self.version if begun.partial is None else begun.partial
        return begun

    def one_in_flight(self):
        return self.draw.choice(sorted(self.flying)) if self.flying else None

    def put(self, flat=None):
        if (number := self.one_in_flight()) is not None:
            version = self.flying.pop(number)
            flat = self.draw.random() < 0.4 if flat is None else flat
            self.buffer.put(number, (number, version), versions=(version, self.version), flat=flat)
            self.model.arrive(number, self.updates_at[version], flat)

    def give_back(self):
        if (number := self.one_in_flight()) is not None:
            version = self.flying.pop(number)
            partial = version if self.draw.random() < 0.5 else None
            self.buffer.give_back(number, partial)
            self.model.give_back(number, partial)

    def journal(self):
        """A report of the workers, or one that says nothing."""
        if (number := self.one_in_flight()) is not None:
            known = self.flying[number] if self.draw.random() < 0.8 else None
            self.buffer.journal(number, known)
            self.model.journal[number] = known

    def abort_expired(self):
        for number in self.buffer.expired():
            del self.flying[number]
            self.buffer.give_back(number)
            self.model.give_back(number, None)

    def due(self):
        return self.model.updates_until(self.model.batches)

    def update(self, late=False):
        """If the history is not regular, also where none is due, and not always where one is."""
        if self.due() if self.regular else self.draw.random() < (0.7 if late else 0.3):
            if self.draw.random() < 0.3:  # interrupts everything
                for number in sorted(self.flying):
                    version = self.flying.pop(number)
                    self.buffer.give_back(number, version)
                    self.model.give_back(number, version)
            self.send()

    def send(self):
        self.version += 1
        self.model.update()
        self.updates_at[self.version] = self.model.updates
        self.buffer.set_version(self.version)

    def rewind(self):
        """The trainer returns to an earlier rollout, and sends its weights again if the workers' are newer."""
        if self.model.batches > self.model.first:
            batch = self.draw.randint(self.model.first, self.model.batches - 1)
            self.buffer.rewind(batch)
            self.model.rewind(batch)
            needed = self.regular and self.updates_at[self.version] > self.model.updates
            for _ in range(self.draw.randint(needed, 2)):  # once more is the same again
                self.send()

    def send_again(self):
        self.version += 1
        self.updates_at[self.version] = self.model.updates
        self.buffer.set_version(self.version, same_weights=True)

    def take(self):
        model = self.model
        if model.batches == model.num_batches:
            return False
        if self.due():
            self.update(late=True)
        if self.due():
            model.updated_at = model.batches  # the update does not come: there are no newer weights
        expected = model.take()
        try:
            taken = self.buffer.take(timeout=0)
        except TimeoutError:
            assert expected is None
            return False
        assert [group.number for group in taken] == expected
        for number, (own, version) in taken:
            assert own == number
            if model.on_stale != "train":
                assert model.updates - self.updates_at[version] <= model.staleness
            assert self.buffer.staleness(version) == max(0, model.updates - self.updates_at[version])
        model.note_taken(expected)
        return True

    def save(self):
        """A checkpoint after the last batch that was taken was trained, or while it is trained."""
        out = self.model.trained[-1] if self.model.trained else []
        before = bool(out) and self.model.updated_at < self.model.batches and self.draw.random() < 0.5
        # Only an update that is due after the batch says that the weights are newer than those that the workers have.
        trained = self.model.batches - before
        state = pickle.dumps(self.buffer.state_dict(lambda data: ("saved", data), trained=trained))
        model = copy.deepcopy(self.model)
        if before:
            model.trained.pop()
        model.after_resume(out if before else [])
        self.saved = state, model, self.version, dict(self.updates_at), self.dropped

    def resume(self):
        """The driver is killed, and its successor continues from the last checkpoint: all else is forgotten."""
        if self.saved is None:
            return
        state, model, self.version, updates_at, self.dropped = self.saved
        self.model, self.updates_at, self.flying = copy.deepcopy(model), dict(updates_at), {}
        self.buffer = SampleBuffer(**self.how)
        due = self.model.updates_until(self.model.batches)
        self.model.rewound = self.updates_at[self.version] > self.model.updates
        self.buffer.load_state_dict(pickle.loads(state), restore=lambda saved: saved[1])
        if due or self.model.rewound:
            self.version += 1
            self.model.update()
            self.updates_at[self.version] = self.model.updates
            self.model.sent_at = self.model.batches
        self.model.rewound = self.model.sent_at == self.model.batches  # until a batch is taken
        for number in self.model.of("pending"):
            if self.model.too_old(number):  # expired in flight
                self.model.drop(number)
        self.model.updated_at = self.model.batches
        assert self.buffer.version == self.version and self.buffer.batches == self.model.batches

    def finish(self):
        """Generation goes on until all batches are taken. `take` may only wait for a group in flight."""
        model = self.model
        while model.batches < model.num_batches:
            while self.begin():
                self.check()
            took = self.take()
            self.check()
            if not took:
                while self.begin():
                    self.check()
                assert self.flying or self.buffer.expired()
                self.abort_expired()
                self.put(flat=False)
                self.check()
        while self.flying:
            self.put(flat=False)
        self.check()
        trained = model.of("trained")
        assert len(trained) == model.size * model.num_batches
        assert sorted(trained + model.of("filtered")) == list(range(len(model.state)))
        kept = 0
        filtered = 0
        for number in range(len(model.state)):  # at most max_filtered between each batch of kept numbers
            filtered += model.state[number] == "filtered"
            assert filtered <= model.limit
            if model.state[number] == "trained":
                kept += 1
                filtered = 0 if kept % model.size == 0 else filtered
