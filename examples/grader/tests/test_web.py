"""The page, through HTTP, without a kernel and with a made-up gateway: upload, progress, result, correction, export."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

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


def zipped(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(f"all/{name}.ipynb", data)
    return out.getvalue()


async def test_notebooks_of_a_zip_are_graded_corrected_and_exported(page: httpx.AsyncClient) -> None:
    files = {"notebooks": ("all.zip", zipped(one=EMPTY, two=INJECTION))}
    uploaded = await page.post("/batches", data={"assignment": "sample"}, files=files)
    assert uploaded.status_code == 303
    batch = uploaded.headers["location"]
    async with asyncio.timeout(250):
        while any(row["state"] != "done" for row in (await page.get(f"{batch}/state")).json()):
            await asyncio.sleep(0.1)
    first, second = (await page.get(f"{batch}/state")).json()
    assert (first["name"], second["review"]) == ("all_one.ipynb", "review")
    assert second["layers"]["code"] == "done qwen on p and d"
    result = f"/submissions/{second['id']}"
    assert "addresses the models" in (await page.get(result)).text
    corrected = await page.post(f"{result}/corrections", data={"section": "mean", "points": "3", "reason": "by hand"})
    assert corrected.status_code == 303
    assert "by hand" in (await page.get(result)).text
    assert (await page.get(f"{batch}/results.csv")).text.count("\n") == 3
    assert "mean: 3 of 3" in (await page.get(f"{result}/feedback.html")).text
    assert "qwen" in (await page.get("/models")).text and batch in (await page.get("/")).text
    assert (await page.get(batch)).status_code == 200


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
        [("a.zip", zipped(one=b"1") * 2 + b"x" * 100_000)],
        [(f"{number}.ipynb", b"") for number in range(uploads.MAX_NOTEBOOKS + 1)],
        [],
    ],
)
def test_uploads_outside_the_bounds_are_refused(files: list[tuple[str, bytes]]) -> None:
    with pytest.raises(NotebookError):
        uploads.notebooks(files)


def test_a_zip_bomb_is_read_up_to_the_bounds_only() -> None:
    with pytest.raises(NotebookError):
        uploads.notebooks([("bomb.zip", zipped(**{str(number): bytes(8 << 20) for number in range(20)}))])
