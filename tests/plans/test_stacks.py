"""Stacks and errors of many ranks, as text that stays short."""

from single_controller.call.errors import MAX_STACKS, Failure, first_cause, ranks_text, show_stacks


def test_ranks_text():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1]) == "ranks 0, 1"
    assert ranks_text([0, 2, 3]) == "ranks 0, 2, 3"
    assert ranks_text([0, 1, 2, 5, 7, 8, 9]) == "ranks 0-2, 5, 7-9"
    assert ranks_text(range(1024)) == "ranks 0-1023"
    every_other = ranks_text(range(0, 1024, 2))
    assert every_other.startswith("ranks 0, 2, 4") and every_other.endswith("and more, 512 in all")
    assert len(every_other) < 200


def test_the_one_rank_that_is_elsewhere_is_shown_first():
    stacks = {rank: "  in all_reduce" for rank in range(1024)} | {700: "  in read_file"}
    shown = show_stacks(stacks)
    assert shown.splitlines()[:2] == ["rank 700 is at:", "  in read_file"]
    assert "ranks 0-699, 701-1023 are at:" in shown and len(shown) < 200


def test_text_is_bounded_when_every_rank_is_elsewhere():
    shown = show_stacks({rank: f"  line {rank}" for rank in range(1024)})
    assert shown.count("is at:") == MAX_STACKS
    assert f"other stacks, not shown: {1024 - MAX_STACKS}" in shown and len(shown) < 2000


def failure(rank, kind, message, when):
    return Failure(rank, "host", "train", kind, message, "Traceback ...", when)


def test_error_of_many_ranks_names_the_cause_once():
    failures = [
        failure(rank, "OutOfMemoryError", f"tried to allocate {rank}.5 GB", 10.0 - (rank == 3)) for rank in range(8)
    ]
    failures += [failure(8, "RuntimeError", "Connection closed by peer", 5.0)]
    failures += [failure(9 + k, f"Error{k}", "x" * 5000, 20.0) for k in range(6)]
    error = first_cause(failures).error(failures=failures)
    assert str(error).startswith(
        "train() raised OutOfMemoryError on ranks 0-7; first: rank 3 (host): tried to allocate 3.5 GB\n"
        "also on rank 8: RuntimeError: Connection closed by peer\n"
    )
    assert error.ranks == tuple(range(8)) and error.rank == 3
    assert "other causes, not shown: 4" in str(error) and len(str(error)) < 1500


def test_error_of_one_rank_reads_as_before():
    only = failure(2, "ValueError", "bad row", 0.0)
    assert str(only.error(failures=[only])) == "train() raised ValueError on rank 2 (host): bad row\n\nTraceback ..."
    assert only.error().ranks == (2,)


def test_error_names_the_ranks_whose_results_were_lost():
    failures = [failure(0, "ValueError", "bad row", 0.0), Failure.lost_contact(3, "host", "no route to host")]
    assert "\nalso on rank 3: its result was lost: no route to host\n" in str(failures[0].error(failures=failures))
