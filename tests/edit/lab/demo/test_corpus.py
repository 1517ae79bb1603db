from pathlib import Path

import pytest

from edit.errors import ConfigError
from edit.lab.demo.corpus import Group, SourceFile, plan_corpus, standard_library, write_corpus


def files_of(sizes: dict[str, int]) -> list[SourceFile]:
    return [SourceFile(Path(name), name, size) for name, size in sizes.items()]


def packages_of(group: Group) -> set[str]:
    return {file.package for file in (*group.train, *group.held_out)}


MANY = files_of({f"pack{p}.mod{m}": 9_000 + 700 * p + 31 * m for p in range(12) for m in range(8)})


def test_groups_are_disjoint_whole_packages_of_similar_size():
    groups = plan_corpus(MANY, 4, seed=0)
    owners = [package for group in groups for package in packages_of(group)]
    assert sorted(owners) == sorted({file.package for file in MANY})
    sizes = [sum(file.size for file in (*group.train, *group.held_out)) for group in groups]
    assert max(sizes) < 1.3 * min(sizes)


def test_every_file_is_used_once_and_the_held_out_ones_are_not_trained_on():
    groups = plan_corpus(MANY, 3, seed=0, cap=1 << 30)
    names = [file.name for group in groups for file in (*group.train, *group.held_out)]
    assert sorted(names) == sorted(file.name for file in MANY)


def test_each_group_holds_out_a_little_of_its_own_text():
    for group in plan_corpus(MANY, 3, seed=5, cap=1 << 30):
        total = sum(file.size for file in (*group.train, *group.held_out))
        assert 0 < sum(file.size for file in group.held_out) <= 0.06 * total


def test_a_group_of_large_files_still_holds_out_its_smallest():
    groups = plan_corpus(files_of({"a": 50_000, "b": 40_000}), 1, seed=0)
    assert [file.name for file in groups[0].held_out] == ["b"]


def test_the_cap_holds_for_the_sum_and_for_each_group():
    groups = plan_corpus(MANY, 4, seed=0, cap=300_000)
    for group in groups:
        assert sum(file.size for file in (*group.train, *group.held_out)) <= 75_000


def test_the_seed_decides_what_is_held_out_and_nothing_else():
    first, again, other = (plan_corpus(list(reversed(MANY)) if i == 1 else MANY, 4, seed=[1, 1, 2][i]) for i in range(3))
    assert first == again
    assert [packages_of(group) for group in first] == [packages_of(group) for group in other]
    assert [group.held_out for group in first] != [group.held_out for group in other]


def test_too_many_peers_for_the_text_is_a_configuration_error():
    with pytest.raises(ConfigError, match="use fewer peers"):
        plan_corpus(MANY, 64, seed=0)


def test_written_folders_hold_the_bytes_of_the_files(tmp_path):
    library = tmp_path / "lib"
    for name in ("alpha/one.py", "alpha/two.py", "beta.py", "test/skipped.py", "site-packages/skipped.py", "alpha/tests/no.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(name.encode() * 3_000)
    found = standard_library(library)
    assert [file.name for file in found] == ["alpha.one", "alpha.two", "beta"]
    write_corpus(plan_corpus(found, 1, seed=0), tmp_path / "data")
    assert sorted(folder.name for folder in (tmp_path / "data").iterdir()) == ["peer-0", "validation"]
    written = {path.name: path for folder in (tmp_path / "data").iterdir() for path in folder.iterdir()}
    assert sorted(written) == ["alpha.one.py", "alpha.two.py", "beta.py"]
    assert written["alpha.two.py"].read_bytes() == b"alpha/two.py" * 3_000
    assert any((tmp_path / "data" / "validation").iterdir())


def test_this_machines_standard_library_feeds_four_peers():
    groups = plan_corpus(standard_library(), 4, seed=0)
    sizes = [sum(file.size for file in group.train) for group in groups]
    assert sum(sizes) <= 6_000_000
    assert min(sizes) > 500_000
