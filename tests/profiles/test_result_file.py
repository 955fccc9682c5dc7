"""What a result says of where it comes from."""

import shutil
import subprocess

import pytest

from profiles.result_file import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(*arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def head(tmp_path, monkeypatch):
    """The commit of a repository, the working directory."""
    monkeypatch.chdir(tmp_path)
    git("init", "--quiet")
    (tmp_path / "code.py").write_text("")
    git("add", ".")
    git("commit", "--quiet", "--message=a")
    return git("rev-parse", "HEAD")


def test_the_commit_is_the_codes(head, tmp_path):
    results = tmp_path / "profiles" / "results"
    results.mkdir(parents=True)
    (results / "a.json").write_text("{}")
    assert provenance(None)["commit"] == head
    (tmp_path / "code.py").write_text("changed")
    assert provenance(None)["commit"] == f"{head}-dirty"
    assert provenance("said")["commit"] == "said"


def test_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance(None)["commit"] == "unknown"
