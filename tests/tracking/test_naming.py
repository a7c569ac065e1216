"""A run's name in a tracker: from its overrides, short, stable and distinct."""

from pathlib import Path

from src.tracking.naming import MAX_NAME, run_name, run_tags

CONFIG = {
    "seed": 0,
    "name": None,
    "trainer": {"accumulate": 1, "max_steps": None},
    "model": {"_target_": "a", "width": 8, "vocab_size": 10},
    "data": {"_target_": "b", "vocab_size": 10, "root": None},
}
FOLDER = Path("multirun/2026-11-30_12-00-00-abcdef")


def name_of(*overrides: str) -> str:
    return run_name({"overrides": list(overrides)}, CONFIG, FOLDER)


def test_the_name_says_what_was_overridden_options_of_groups_first() -> None:
    assert name_of("strategy=fsdp", "trainer.accumulate=4") == "strategy=fsdp accumulate=4"


def test_the_order_of_the_overrides_does_not_matter() -> None:
    assert name_of("seed=1", "strategy=fsdp") == name_of("strategy=fsdp", "seed=1")


def test_a_word_that_two_groups_share_keeps_its_group() -> None:
    assert name_of("model.vocab_size=5") == "model.vocab_size=5"
    assert name_of("model.vocab_size=5") != name_of("data.vocab_size=5")


def test_how_a_run_is_tracked_is_no_part_of_its_name() -> None:
    assert name_of("seed=1", "tracking=offline", "tracking.tags=[a]", "name=x") == "seed=1"


def test_long_names_are_cut_and_stay_distinct_and_stable() -> None:
    many = [f"+model.option_{number}=value_{number}" for number in range(20)]
    first, second = name_of(*many), name_of(*many[:-1], "+model.option_19=other")
    assert len(first) == len(second) == MAX_NAME
    assert first != second
    assert first == name_of(*reversed(many))


def test_long_values_are_cut_and_stay_distinct() -> None:
    ours, theirs = (
        name_of("data.root=/very/long/path/to/the/data/ours"),
        name_of("data.root=/very/long/path/to/the/data/theirs"),
    )
    assert ours.startswith("root=/very/long/path/to")
    assert ours != theirs
    assert len(ours) < 40


def test_added_and_removed_keys_can_be_told_apart() -> None:
    assert name_of("~trainer.max_steps") == "~max_steps"
    assert name_of("+trainer.max_steps=1") == "max_steps=1"


def test_without_overrides_the_folder_names_the_run() -> None:
    assert name_of() == FOLDER.name
    # A job of a sweep has a folder called 0, like that of every other sweep.
    assert run_name({"overrides": [], "sweep": "2026-11-30"}, CONFIG, Path("multirun/2026-11-30/0")) == "2026-11-30/0"


def test_tags_are_the_choices_by_which_people_filter() -> None:
    choices = {"strategy": "fsdp", "sharding": "zero3", "precision": "bf16", "model": "cnn", "data": "digits"}
    assert run_tags({"choices": {**choices, "optimizer": "adamw", "experiment": None}}) == list(choices.values())
    assert run_tags({"choices": {"strategy": "ddp", "model": None}}) == ["ddp"]
