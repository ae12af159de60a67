"""What uv answers becomes a lock and its SBOM; what is not a wheel with a hash is refused."""

from __future__ import annotations

import json

import pytest

from gpufleet.artifacts import package_lock
from gpufleet.artifacts.package_lock import Package
from gpufleet.errors import FleetError

ONE, TWO = "1" * 64, "2" * 64
FOUND = (
    Package("alpha", "1.0+cu130", {"alpha-1.0+cu130-py3-none-any.whl": ONE}, "os_name == 'posix'"),
    Package("beta", "2.0", {"beta-2.0-py3-none-any.whl": TWO}),
)


def pylock(*packages: str) -> str:
    return 'lock-version = "1.0"\n' + "".join(f"[[packages]]\n{each}\n" for each in packages)


def wheel(where: str, digest: str = ONE) -> str:
    hashes = f'{{ sha256 = "{digest}" }}' if digest else "{}"
    return f"wheels = [{{ {where}, hashes = {hashes} }}]"


@pytest.mark.parametrize(
    "where",
    [
        'url = "http://x.example.net/a/beta-2.0%2Bcu1-py3-none-any.whl#egg"',
        'path = "wheels/beta-2.0+cu1-py3-none-any.whl"',
        'name = "beta-2.0+cu1-py3-none-any.whl"',
    ],
)
def test_a_wheel_is_known_by_its_file_wherever_it_lies(where: str) -> None:
    text = pylock(f'name = "beta"\nversion = "2.0+cu1"\n{wheel(where)}')
    (found,) = package_lock.packages(text)
    assert found == Package("beta", "2.0+cu1", {"beta-2.0+cu1-py3-none-any.whl": ONE})


def test_everything_without_a_wheel_or_a_hash_is_named_at_once() -> None:
    with pytest.raises(FleetError) as refused:
        package_lock.packages(
            pylock(
                'name = "source"\nversion = "1"\nsdist = { url = "x.tar.gz", hashes = {} }',
                'name = "plain"\nversion = "2"\n' + wheel('name = "plain-2-py3-none-any.whl"', ""),
                'name = "fine"\nversion = "3"\n' + wheel('name = "fine-3-py3-none-any.whl"'),
            )
        )
    first, second = refused.value.problems
    assert first.startswith("source 1: has no wheel")
    assert second == "plain 2: the index lists one of its wheels without SHA-256"
    with pytest.raises(FleetError, match="no package"):
        package_lock.packages(pylock())


def test_the_lock_is_in_the_form_of_uv() -> None:
    text = package_lock.lock_text(FOUND)
    assert text == (
        f"alpha==1.0+cu130 ; os_name == 'posix' \\\n    --hash=sha256:{ONE}\n"
        f"beta==2.0 \\\n    --hash=sha256:{TWO}\n"
    )
    assert [*package_lock.pins_of(text)] == [("alpha", "1.0+cu130"), ("beta", "2.0")]
    assert package_lock.constraints(text, "beta") == "alpha==1.0+cu130 ; os_name == 'posix'\n"


def test_the_same_lock_has_the_same_sbom_and_another_one_another_number() -> None:
    text = package_lock.sbom_text(FOUND, "vllm", "1")
    assert text == package_lock.sbom_text(iter(FOUND), "vllm", "1")
    other = package_lock.sbom_text(FOUND[:1], "vllm", "1")
    assert json.loads(text)["serialNumber"] != json.loads(other)["serialNumber"]
    assert json.loads(text)["version"] == 1, "CycloneDX counts from 1"
    # A local version's plus sign is encoded in a package URL.
    assert json.loads(text)["components"][0]["purl"] == "pkg:pypi/alpha@1.0%2Bcu130"


def test_a_lock_and_an_sbom_that_differ_are_told_by_what() -> None:
    lock, sbom = package_lock.lock_text(FOUND), package_lock.sbom_text(FOUND, "vllm", "1")
    source = Package("beta", "2.0", {"beta-2.0.tar.gz": TWO})
    assert package_lock.sbom_differences(lock, sbom) == ()
    assert package_lock.sbom_differences(
        lock, package_lock.sbom_text((FOUND[0], source), "vllm", "1")
    ) == ("beta-2.0.tar.gz is not a wheel",)
    assert package_lock.sbom_differences(lock.replace(TWO, "3" * 64), sbom) == (
        f"only the lock has the hash {'3' * 64}",
        f"only the SBOM has the hash {TWO}",
    )
    assert package_lock.sbom_differences(lock.replace("beta==2.0", "beta==2.1"), sbom) == (
        "only the lock has beta==2.1",
        "only the SBOM has beta==2.0",
    )
    for broken in ("", "[]", '{"components": [{}]}'):
        with pytest.raises(FleetError, match="cannot be read"):
            package_lock.sbom_differences(lock, broken)


def test_a_pin_by_an_address_has_the_version_of_its_file_or_none() -> None:
    text = "a @ https://x.example.net/a-1.2-py3-none-any.whl\nb @ git+https://x.example.net/b\n"
    assert [*package_lock.pins_of(text)] == [("a", "1.2"), ("b", "")]
