"""/v1/files: what batches read, and what they write."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http import HttpProcessingError

from jaxserve.errors import RequestError
from jaxserve.server.auth import CALLER
from jaxserve.server.batches import runner_of
from jaxserve.server.file_store import Upload
from jaxserve.server.listing import FileQuery, file_list
from jaxserve.server.openai import decode_query
from jaxserve.server.replies import json_response

CHUNK = 1 << 16
MAX_FIELD = 1000
"""Bytes of a form's field that is no file."""


class FileForm(msgspec.Struct, frozen=True):
    """The form of an upload. `file`: lines of JSON, with a file name."""

    purpose: Literal["batch"]
    file: bytes


class Deleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


async def upload_file(http: web.Request) -> web.Response:
    """POST /v1/files."""
    runner = runner_of(http)
    if http.content_type != "multipart/form-data":
        raise RequestError("send a form, multipart/form-data, with purpose and file")
    with Upload(runner.files, http[CALLER].owner) as upload:
        try:
            filename = await read_form(await http.multipart(), upload)
        except RequestError:
            raise
        except (ValueError, LookupError, web.RequestPayloadError, HttpProcessingError) as error:
            raise RequestError(f"the form cannot be read: {error}") from error
        await asyncio.to_thread(upload.sync)
        return json_response(upload.finish(filename))


async def read_form(form: MultipartReader, upload: Upload) -> str:
    """Take in the file of a form whose fields come in any order; its name. RequestError for
    another form."""
    purpose = filename = None
    async for part in form:
        if not isinstance(part, BodyPartReader):
            raise RequestError("the form has a form in it")
        match part.name:
            case "purpose" if purpose is None:
                purpose = await read_field(part)
            case "file" if filename is None:
                filename = part.filename or "upload.jsonl"
                if not filename.isprintable():
                    raise RequestError("the file's name is no text: send it as UTF-8", param="file")
                while chunk := await part.read_chunk(CHUNK):
                    upload.write(chunk)
            case name:
                raise RequestError(
                    f"the form has {str(name)[:80]!r} twice, or it is not supported: send purpose "
                    "and file, once each",
                    param=name,
                )
    if filename is None:
        raise RequestError("file is missing", param="file")
    if purpose != "batch":
        raise RequestError(f"purpose is {purpose!r}: it must be 'batch'", param="purpose")
    return filename


async def read_field(part: BodyPartReader) -> str:
    """The text of a short field."""
    raw = b""
    while chunk := await part.read_chunk(CHUNK):
        raw += chunk
        if len(raw) > MAX_FIELD:
            raise RequestError(f"{part.name} is longer than {MAX_FIELD} bytes", param=part.name)
    return raw.decode()


async def list_files(http: web.Request) -> web.Response:
    """GET /v1/files."""
    query = decode_query(http.query, FileQuery)
    return json_response(file_list(runner_of(http).files.all_of(http[CALLER].owner), query))


async def show_file(http: web.Request) -> web.Response:
    """GET /v1/files/ID."""
    return json_response(runner_of(http).files.get(http.match_info["file_id"], http[CALLER].owner))


async def file_content(http: web.Request) -> web.FileResponse:
    """GET /v1/files/ID/content."""
    files = runner_of(http).files
    file = files.get(http.match_info["file_id"], http[CALLER].owner)
    return web.FileResponse(files.path(file.id), headers={"Content-Type": "application/jsonl"})


async def delete_file(http: web.Request) -> web.Response:
    """DELETE /v1/files/ID. RequestError while a batch reads it."""
    runner, file_id = runner_of(http), http.match_info["file_id"]
    runner.files.get(file_id, http[CALLER].owner)
    batch = runner.batches.reads(file_id)
    if batch is not None:
        raise RequestError(f"{batch} reads this file: cancel it first, or wait", param="file_id")
    runner.files.delete(file_id, http[CALLER].owner)
    return json_response(Deleted(file_id))


FILE_ROUTES = (
    web.post("/v1/files", upload_file),
    web.get("/v1/files", list_files),
    web.get("/v1/files/{file_id}", show_file),
    web.get("/v1/files/{file_id}/content", file_content),
    web.delete("/v1/files/{file_id}", delete_file),
)
