"""The page, through HTTP, without a kernel and with a made-up gateway: upload, progress, result, correction, export."""

from __future__ import annotations

import asyncio
import io
import time
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from grader import rubric
from grader.errors import NotebookError
from grader.store import Store
from grader.web import uploads
from grader.web.app import create
from tests.fake import FakeGateway

ROOT = Path(__file__).parents[1]
EMPTY = (ROOT / "samples" / "empty.ipynb").read_bytes()
INJECTION = (ROOT / "samples" / "injection.ipynb").read_bytes()
pytestmark = pytest.mark.usefixtures("no_kernel")


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    sample = rubric.load(ROOT / "assignments" / "sample")
    store = Store(tmp_path / "grader.db")
    app = create(store, FakeGateway(), {"sample": sample})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client
        while app.state.grader.tasks:
            await asyncio.gather(*app.state.grader.tasks)
    store.close()


def zipped(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(f"all/{name}.ipynb", data)
    return out.getvalue()


async def ended(page: httpx.AsyncClient, batch: str) -> list[dict[str, Any]]:
    """The rows of a batch once each is graded or has failed."""
    async with asyncio.timeout(250):
        while True:
            rows: list[dict[str, Any]] = (await page.get(f"{batch}/state")).json()
            if all(row["state"] in ("done", "failed") for row in rows):
                return rows
            await asyncio.sleep(0.02)


async def test_notebooks_of_a_zip_are_graded_corrected_and_exported(page: httpx.AsyncClient) -> None:
    files = {"notebooks": ("all.zip", zipped({"one": EMPTY, "two": INJECTION}))}
    uploaded = await page.post("/batches", data={"assignment": "sample"}, files=files)
    assert uploaded.status_code == 303
    batch = uploaded.headers["location"]
    first, second = await ended(page, batch)
    assert (first["name"], second["review"]) == ("all_one.ipynb", "review")
    assert second["layers"]["code"] == "done qwen on p and d, TTFT 0.50 s"
    result = f"/submissions/{second['id']}"
    assert "addresses the models" in (await page.get(result)).text
    corrected = await page.post(f"{result}/corrections", data={"section": "mean", "points": "3", "reason": "by hand"})
    assert corrected.status_code == 303
    shown = (await page.get(result)).text
    assert 'maxlength="500" value="by hand"' in shown and "3 by hand</li>" in shown
    assert "mean = 0\nprint(mean)</pre>" in shown, "the cells of a section are beside its points"
    assert (await page.get(f"{batch}/results.csv")).text.count("\n") == 3
    feedback = (await page.get(f"{result}/feedback.html")).text
    assert "mean: 3 of 3<br>number mean: no number<br>number: no number<br>Corrected: by hand</li>" in feedback
    home = (await page.get("/")).text
    assert "qwen" in (await page.get("/models")).text and batch in home and time.strftime("%Y-%m-%d ") in home
    assert (await page.get(batch)).status_code == 200


async def test_a_page_is_made_for_each_student_of_a_batch_that_is_graded(page: httpx.AsyncClient) -> None:
    files = {"notebooks": ("all.zip", zipped({"one": EMPTY, "two": INJECTION}))}
    batch = (await page.post("/batches", data={"assignment": "sample"}, files=files)).headers["location"]
    await ended(page, batch)
    with zipfile.ZipFile(io.BytesIO((await page.get(f"{batch}/students.zip")).content)) as archive:
        assert archive.namelist() == ["all_one.html", "all_two.html"]
        assert "of 10 points" in archive.read("all_two.html").decode()


async def test_a_notebook_that_failed_is_graded_again_on_demand(
    page: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.errors import SandboxError

    def refuse(*_: object) -> None:
        raise SandboxError("no namespaces here")

    with monkeypatch.context() as patched:
        patched.setattr("grader.sandbox.execute", refuse)
        files = {"notebooks": ("one.ipynb", EMPTY)}
        batch = (await page.post("/batches", data={"assignment": "sample"}, files=files)).headers["location"]
        (failed,) = await ended(page, batch)
        assert (failed["state"], failed["error"]) == ("failed", "no namespaces here")
        assert set(failed["layers"].values()) == {""}, "nothing of it runs"
        assert "is failed. no namespaces here" in (await page.get(f"/submissions/{failed['id']}")).text
        assert 'method="post"><button>Grade what failed' in (await page.get(batch)).text
        assert (await page.get(f"{batch}/students.zip")).status_code == 404
    assert (await page.post(f"{batch}/again")).status_code == 303
    assert [row["state"] for row in await ended(page, batch)] == ["done"]
    assert 'method="post" hidden><button>Grade what failed' in (await page.get(batch)).text


async def test_a_batch_that_waits_for_the_gateway_says_so(tmp_path: Path) -> None:
    class Away(FakeGateway):
        back = asyncio.Event()

        async def rooms(self, models: Sequence[str]) -> dict[str, int]:
            self.waits_for = "no answer from the gateway at here"
            await self.back.wait()
            self.waits_for = ""
            return await super().rooms(models)

    store, gateway = Store(tmp_path / "grader.db"), Away()
    app = create(store, gateway, {"sample": rubric.load(ROOT / "assignments" / "sample")})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as page:
        files = {"notebooks": ("one.ipynb", EMPTY)}
        batch = (await page.post("/batches", data={"assignment": "sample"}, files=files)).headers["location"]
        async with asyncio.timeout(60):
            while (row := (await page.get(f"{batch}/state")).json()[0])["error"] != gateway.waits_for or not row[
                "error"
            ]:
                await asyncio.sleep(0.02)
        assert row["state"] == "running"
        gateway.back.set()
        assert [row["error"] for row in await ended(page, batch)] == [""]
    store.close()


async def test_a_batch_that_an_earlier_program_graded_has_its_layers(page: httpx.AsyncClient, tmp_path: Path) -> None:
    files = {"notebooks": ("two.ipynb", INJECTION)}
    batch = (await page.post("/batches", data={"assignment": "sample"}, files=files)).headers["location"]
    (row,) = await ended(page, batch)
    assert row["layers"]["validation"] == "done 0 of 3 sections complete"
    assert row["layers"]["writing"].startswith("done gpt-oss on p and d, TTFT 0.50 s")
    later = Store(tmp_path / "grader.db")
    app = create(later, FakeGateway(), {})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert (await client.get(f"{batch}/state")).json() == [row]
    later.close()


async def test_points_outside_the_rubric_and_unknown_pages_are_refused(page: httpx.AsyncClient) -> None:
    refused = await page.post("/submissions/7/corrections", data={"section": "mean", "points": "3"})
    assert refused.status_code == 400
    for path in ("/submissions/7", "/batches/none", "/batches/none/results.csv"):
        assert (await page.get(path)).status_code == 404


async def test_forms_of_other_pages_and_other_host_names_are_refused(page: httpx.AsyncClient) -> None:
    other = await page.post("/batches", data={"assignment": "sample"}, headers={"Origin": "http://example.org"})
    assert other.status_code == 403
    assert (await page.get("/", headers={"Host": "example.org"})).status_code == 400


async def test_an_upload_without_notebooks_and_one_that_is_too_large_are_refused(page: httpx.AsyncClient) -> None:
    files = {"notebooks": ("notes.txt", b"x")}
    assert (await page.post("/batches", data={"assignment": "sample"}, files=files)).status_code == 400
    large = await page.post("/batches", content=b"", headers={"Content-Length": str(1 << 40)})
    assert large.status_code == 413


@pytest.mark.parametrize(
    "files",
    [
        [("a.ipynb", b"1"), ("b/a.ipynb", b"2")],
        [("a.zip", b"no zip")],
        [("a.zip", zipped({"one": b"1"}) * 2 + b"x" * 100_000)],
        [(f"{number}.ipynb", b"") for number in range(uploads.MAX_NOTEBOOKS + 1)],
        [],
    ],
)
def test_uploads_outside_the_bounds_are_refused(files: list[tuple[str, bytes]]) -> None:
    with pytest.raises(NotebookError):
        uploads.notebooks(files)


def test_a_zip_bomb_is_read_up_to_the_bounds_only() -> None:
    with pytest.raises(NotebookError):
        uploads.notebooks([("bomb.zip", zipped({str(number): bytes(8 << 20) for number in range(20)}))])


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_whose_size_cannot_be_bounded_while_it_is_read_is_refused(method: int) -> None:
    with pytest.raises(NotebookError, match="another method than deflate"):
        uploads.notebooks([("bomb.zip", zipped({"one": bytes(8 << 20)}, method))])


def test_a_zip_with_a_list_of_members_that_would_fill_the_memory_is_refused() -> None:
    names = {f"{number:0>50000}": b"" for number in range(100)}
    with pytest.raises(NotebookError, match="too many members"):
        uploads.notebooks([("many.zip", zipped(names, zipfile.ZIP_STORED))])


def test_a_zip_with_damaged_content_is_refused() -> None:
    data = bytearray(zipped({"one": EMPTY}))
    data[60:90] = bytes(30)
    with pytest.raises(NotebookError):
        uploads.notebooks([("damaged.zip", bytes(data))])
