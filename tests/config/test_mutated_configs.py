"""Configs that nobody would write: each is valid, or is refused with a message; nothing else happens."""

import re
import shutil
from dataclasses import replace
from functools import cache

import pytest
import yaml
from helpers.mutated_prototxts import mutated

from mheads.common import safe_yaml
from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.config.schema import Config
from mheads.data import DATASETS
from mheads.training.experiment import build_experiment


def cheap(config):
    """Whether building it takes no time and cannot end this process, which `os:abort` does."""
    return config.data.name == "digits" and config.members < 20 and config.model == "digits"


def test_each_of_300_mutated_configs_is_a_config_or_a_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = DATASETS["digits"]
    monkeypatch.setitem(DATASETS, "digits", replace(digits, read=cache(digits.read)))
    file = tmp_path / "config.yaml"
    valid, built, messages = 0, 0, set()
    for number in range(300):
        file.write_bytes(mutated(number).encode("utf-8", "surrogatepass"))
        try:
            config = configs.load("config.yaml", ["data.limit=40"])
            assert isinstance(config, Config)
            valid += 1
            if number % 10 == 0:
                assert configs.validate(safe_yaml.from_yaml(config.to_yaml())) == config
            if cheap(config):
                build_experiment(config)
                built += 1
        except UserError as error:
            messages.add(str(error)[:60])
        except Exception as error:
            raise AssertionError(f"mutated({number}):\n{mutated(number)[:2000]}") from error
        assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert valid > 50
    assert built > 15
    assert len(messages) > 50


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{there}: &{there} [{', '.join([f'*{here}'] * 10)}]\n" for here, there in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: &x [*x]", "holds itself"),
        ("a: &x {b: {c: *x}}", "holds itself"),
        (LAUGHS, "more than 100,000 values"),
        ("a: " + "[" * 60 + "]" * 60, "more than 50 deep"),
        ("a: " + "[" * 100000, "more than 50 deep"),
        ("".join(f"{' ' * i}a:\n" for i in range(60)), "more than 50 deep"),
        ("a: " + "9" * 5000, "more than 40 digits"),
        ("a: 0x" + "f" * 5000, "more than 40 digits"),
        ("a: 1." + "1" * 5000, "more than 40 digits"),
        ("a: !!int text", "not a number"),
        ("a: !!float ''", "not a number"),
        ("a: !!binary aGVsbG8=", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ('a: "\\ud800"', "no text can have"),
        ('a: "\\0"', "no text can have"),
        ("a: {[1]: 2}", "keys are text"),
        ("a: {true: 2}", "keys are text, not 'true': put it in quotes"),
        ("a: 1\nb: 2\na: 3", "the key 'a' is there twice"),
        ("#" * 2_000_000, "2,000,000 characters"),
    ],
)
def test_yaml_beyond_its_limits_is_refused_with_the_reason(text, part):
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        safe_yaml.from_yaml(text)
    assert len(str(caught.value)) < 500


def test_ordinary_yaml_reads_as_it_always_did():
    text = "a: &x [1, 2.5, -.inf, true, ~, 'x y', 1.0e-3, 0x1F]\nb: *x\n<<: {c: 1, b: 0}\nd: {e: {f: []}}\n"
    assert safe_yaml.from_yaml(text) == yaml.safe_load(text)


def test_text_without_quotes_is_what_yaml_1_2_says():
    text = "a: [1e-3, -2E5, .5, 017, 0o17, +3, yes, no, off, 1:30, 1_000, 2020-01-01, .nan, NULL]\n0: 1"
    found = safe_yaml.from_yaml(text)
    assert [*found["a"][:-2], found["0"]] == [
        0.001, -2e5, 0.5, 17, 15, 3, "yes", "no", "off", "1:30", "1_000", "2020-01-01", 1,
    ]  # fmt: skip
    assert found["a"][-2] != found["a"][-2] and found["a"][-1] is None


def test_what_is_written_reads_back_in_either_version_of_yaml():
    values = ["1e-3", "yes", "017", "0o17", "1:30", "2020-01-01", "~", "", ".5e3", 1e-5, 1e300, 10**20, True, None, "x"]
    text = safe_yaml.to_yaml({"values": values})
    assert safe_yaml.from_yaml(text) == yaml.safe_load(text) == {"values": values}


def test_a_key_that_is_given_twice_is_not_silently_the_last(tmp_path):
    (tmp_path / "c.yaml").write_text("optim: {lr: 0.1}\nmembers: 2\noptim: {momentum: 0.5}\n")
    with pytest.raises(UserError, match="'optim' is there twice"):
        configs.read(tmp_path / "c.yaml")


@pytest.mark.parametrize("override", ["model=sys:exit", "loss.name=sys:exit", "model=user_networks:leaves"])
def test_a_factory_that_ends_the_process_is_a_message(override, monkeypatch):
    import user_networks

    monkeypatch.setattr(user_networks, "leaves", lambda: exit(0), raising=False)
    with pytest.raises(UserError, match="failed with SystemExit"):
        build_experiment(configs.load("digits", [override]))


def test_more_members_than_memory_holds_are_said_before_any_is_made(monkeypatch):
    from mheads import networks as models

    made = []
    monkeypatch.setitem(models.NETWORKS, "digits", lambda f=models.NETWORKS["digits"]: made.append(1) or f())
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    with pytest.raises(UserError, match=r"weights of 10,000 members need 0\.5 GB, and this machine has 0\.0"):
        build_experiment(configs.load("digits", ["members=10000"]))
    assert len(made) == 1
    with pytest.raises(UserError, match="weights, gradients and momentum of 50 members"):
        build_experiment(configs.load("digits", ["members=50"]))


def test_a_step_of_more_rows_than_fit_anywhere_is_refused():
    for override in (["optim.batch_size=10000000"], ["optim.batch_size=1000000", "optim.accumulate=100"]):
        with pytest.raises(UserError, match=r"optim\.batch_size"):
            configs.load("digits", override)


def test_deep_json_in_a_run_folder_is_damage_and_no_traceback(mheads, undisturbed, tmp_path):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    deep = "[" * 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        safe_yaml.from_json(deep)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "state.json").write_text(deep)
    (run / "result.json").write_text(deep)
    (run / "model.safetensors").unlink()
    done = mheads("eval", "--trust", run)  # from a checkpoint, if there were a whole one
    assert done.code == 2
    assert "nested too deeply" in done.out + done.err
    assert "Traceback" not in done.err
