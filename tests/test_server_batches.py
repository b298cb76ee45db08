"""/v1/files and /v1/batches: every line of the input comes out once, whatever happens meanwhile."""

import json
import threading

import msgspec
import pytest
from aiohttp import web
from toy_model import MODEL_NAME
from toy_server import refusal, running_server
from toy_worker import DIE, ERROR, OVERDUE, SLOW

from jaxserve.errors import Overloaded, RequestError
from jaxserve.server import batch_lines, batch_store, file_store
from jaxserve.server.batch_runner import BatchRunner
from jaxserve.server.batch_store import BatchStore
from jaxserve.server.file_store import FileStore, Upload
from jaxserve.server.keys import Keys

COMPLETIONS = "/v1/completions"
BOUNDARY = "a-boundary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(
        batch_dir=tmp_path_factory.mktemp("batches"), batch_concurrency=4
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def a_normal_request_still_works(request):
    yield
    if "server" in request.fixturenames:
        assert request.getfixturevalue("server").complete("still here").text() == "still here"


def line(name, prompt="abc", **fields):
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0} | fields
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}


def jsonl(lines):
    return b"".join(
        (item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines
    )


def form(content, purpose="batch", filename="in.jsonl"):
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
    head += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"'
    return f"{head}\r\n\r\n".encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def upload(server, lines, **headers):
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    reply = server.request("POST", "/v1/files", form(content), FORM | headers)
    assert reply.status == 200, reply.body
    assert reply.json["bytes"] == len(content)
    return reply.json["id"]


def begin(server, lines, **headers):
    body = {
        "input_file_id": upload(server, lines, **headers),
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    reply = server.post("/v1/batches", body, **headers)
    assert reply.status == 200, reply.body
    return reply.json["id"]


def look(server, batch_id):
    return server.request("GET", f"/v1/batches/{batch_id}").json


def ended(server, batch_id):
    assert server.becomes(lambda: look(server, batch_id)["status"] in batch_store.ENDED)
    return look(server, batch_id)


def content(server, file_id):
    if file_id is None:
        return {}
    reply = server.request("GET", f"/v1/files/{file_id}/content")
    found = [json.loads(item) for item in reply.body.splitlines()]
    assert len({item["id"] for item in found}) == len(found)
    return {item["custom_id"]: item for item in found}


def outcome(server, batch):
    """The lines that were answered and those that failed, by name; each is there once."""
    answers, errors = (content(server, batch[f"{which}_file_id"]) for which in ("output", "error"))
    counts = batch["request_counts"]
    assert not answers.keys() & errors.keys()
    assert (len(answers), len(errors)) == (counts["completed"], counts["failed"])
    assert counts["completed"] + counts["failed"] == counts["total"]
    return answers, errors


def text(answer):
    return answer["response"]["body"]["choices"][0]["text"]


# What comes of lines


def test_every_line_is_answered_in_the_batch_class(server, monkeypatch):
    seen = []
    submit = server.service.client.submit
    monkeypatch.setattr(
        server.service.client,
        "submit",
        lambda requests, **rest: seen.extend(requests) or submit(requests, **rest),
    )
    batch = ended(server, begin(server, [line(f"n{i}", f"text {i}") for i in range(100)]))
    answers, errors = outcome(server, batch)
    assert (batch["status"], errors) == ("completed", {})
    assert {name: text(answer) for name, answer in answers.items()} == {
        f"n{i}": f"text {i}" for i in range(100)
    }
    assert {r.service_class for r in seen if r.request_id.startswith("cmpl")} == {"batch"}
    assert batch["error_file_id"] is None
    assert batch["completed_at"] >= batch["finalizing_at"] >= batch["in_progress_at"]
    assert server.becomes(server.is_idle)


def test_bad_lines_become_error_lines_and_hurt_no_others(server):
    lines = [
        line("good"),
        b"",
        b"{",
        b"[" * 100_000,
        b'{"custom_id": "no body", "method": "POST", "url": "/v1/completions"}',
        line("good"),
        line("get") | {"method": "GET"},
        line("elsewhere") | {"url": "/v1/chat/completions"},
        line("extra") | {"more": 1},
        line(""),
        line("stream", stream=True),
        line("hot", temperature=-1),
        line("unknown", surprise=1),
        line("other", model="other"),
        line("refused", [ERROR]),
        line("late", [OVERDUE]),
        line("broken", "\ud800"),
        line("last"),
    ]
    fault = jsonl(lines[:-1]) + jsonl([line("last")]).rstrip()  # no newline at the end
    batch = ended(server, begin(server, fault))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 17, "completed": 2, "failed": 15}
    answers = content(server, batch["output_file_id"])
    assert {name: text(answer) for name, answer in answers.items()} == {
        "good": "abc",
        "last": "abc",
    }
    raw = server.request("GET", f"/v1/files/{batch['error_file_id']}/content").body
    errors = [json.loads(item) for item in raw.splitlines()]
    assert len(errors) == 15
    by_name = {error["custom_id"]: error for error in errors}
    assert "line 3" in next(e["error"]["message"] for e in errors if e["id"].endswith("_3"))
    assert "line before" in by_name["good"]["error"]["message"]
    assert "method" in by_name["get"]["error"]["message"]
    assert "stream" in by_name["stream"]["error"]["message"]
    status = {
        name: error["response"]["status_code"]
        for name, error in by_name.items()
        if error["response"]
    }
    assert status == {"hot": 400, "unknown": 400, "other": 404, "refused": 500, "late": 504}
    assert by_name["hot"]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize("lines", [b"", b"\n \n"])
def test_a_file_without_lines_fails(server, lines):
    batch = ended(server, begin(server, lines))
    assert batch["status"] == "failed"
    assert "no lines" in batch["errors"]["data"][0]["message"]


@pytest.mark.parametrize("lines", [[line(str(i)) for i in range(3)], [line("a"), b"", b""]])
def test_a_file_with_too_many_lines_fails_blank_ones_counted(server, monkeypatch, lines):
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    batch = ended(server, begin(server, lines))
    assert "more than 2 lines" in batch["errors"]["data"][0]["message"]


def test_no_more_lines_than_asked_for_are_at_work_and_others_are_served_meanwhile(tmp_path):
    with running_server(batch_dir=tmp_path, batch_concurrency=3) as server:
        client, most = server.service.client, 0
        submit = client.submit

        def watch(requests, **rest):
            nonlocal most
            inbox = submit(requests, **rest)
            most = max(most, client.num_open)
            return inbox

        client.submit = watch
        first = begin(server, [line(f"a{i}", [97, SLOW, 98]) for i in range(12)])
        second = begin(server, [line(f"b{i}") for i in range(3)])
        assert ended(server, second)["status"] == "completed"
        assert look(server, first)["status"] == "in_progress"  # lines of both take turns
        assert ended(server, first)["request_counts"]["completed"] == 12
        assert most == 3


def test_lines_wait_for_a_server_that_is_full(tmp_path):
    with running_server(batch_dir=tmp_path, max_pending=2, batch_concurrency=8) as server:
        batch = ended(server, begin(server, [line(str(i), [97, SLOW]) for i in range(4)]))
        assert batch["request_counts"]["completed"] == 4


def test_a_line_that_ends_every_engine_is_given_up_and_the_others_are_not(server):
    batch = ended(server, begin(server, [line("deadly", [97, DIE]), *map(line, "abcdef")]))
    answers, errors = outcome(server, batch)
    assert set(answers) == set("abcdef")
    assert errors["deadly"]["response"]["status_code"] == 500
    assert server.becomes(lambda: server.request("GET", "/health").status == 200)


# Cancelling, expiring, stopping


def test_a_cancelled_batch_keeps_what_was_answered(server):
    batch_id = begin(server, [line("fast", "a"), *(line(f"s{i}", [SLOW] * 40) for i in range(200))])
    assert server.becomes(lambda: look(server, batch_id)["request_counts"]["completed"] > 0)
    assert server.post(f"/v1/batches/{batch_id}/cancel", b"").json["status"] == "cancelling"
    batch = ended(server, batch_id)
    answers, errors = outcome(server, batch)
    assert batch["status"] == "cancelled"
    assert len(answers) + len(errors) == 201
    assert text(answers["fast"]) == "a"
    assert {error["error"]["code"] for error in errors.values()} == {"batch_cancelled"}
    assert server.becomes(server.is_idle)
    refusal(server.post(f"/v1/batches/{batch_id}/cancel", b""))


def test_a_batch_whose_window_ends_expires(server, monkeypatch):
    monkeypatch.setattr(batch_store, "WINDOW", 1)
    batch = ended(server, begin(server, [line(f"s{i}", [SLOW] * 40) for i in range(200)]))
    _, errors = outcome(server, batch)
    assert batch["status"] == "expired"
    assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}
    assert server.becomes(server.is_idle)


def test_a_batch_goes_on_after_a_restart_and_answers_no_line_twice(tmp_path):
    lines = [line(f"n{i}", [97, SLOW, 98]) for i in range(24)]
    lines.insert(3, line("n0"))  # a name twice is an error, before and after
    with running_server(batch_dir=tmp_path, batch_concurrency=4) as server:
        batch_id = begin(server, lines)
        assert server.becomes(lambda: look(server, batch_id)["request_counts"]["completed"] >= 8)
    (outputs,) = tmp_path.glob("work/*.outputs.jsonl")
    before = outputs.read_bytes()
    assert 8 <= before.count(b"\n") < 24
    with outputs.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # the process ended while it wrote
    asked = []
    with running_server(batch_dir=tmp_path, batch_concurrency=4) as server:
        batch = ended(server, batch_id)
        reply = server.request("GET", f"/v1/files/{batch['output_file_id']}/content").body
        asked = server.metric("jaxserve_output_tokens_total")
    assert reply.startswith(before)
    answers = [json.loads(item)["custom_id"] for item in reply.splitlines()]
    assert sorted(answers) == sorted(f"n{i}" for i in range(24))
    assert batch["request_counts"] == {"total": 25, "completed": 24, "failed": 1}
    assert asked <= 4 * (24 - before.count(b"\n"))
    assert not list(tmp_path.glob("work/*"))


def test_a_batch_that_stopped_while_its_files_were_handed_over_is_not_asked_again(
    tmp_path, monkeypatch
):
    with running_server(batch_dir=tmp_path) as server, monkeypatch.context() as patch:
        handing = threading.Event()
        real = batch_store.BatchStore.save

        def save(self, record):
            if record.batch.status == "completed":
                handing.set()
                raise OSError("the power is out")
            if record.batch.status != "failed":
                real(self, record)

        patch.setattr(batch_store.BatchStore, "save", save)
        batch_id = begin(server, [line("a"), line("b", temperature=-1)])
        assert handing.wait(10)
        assert server.becomes(lambda: look(server, batch_id)["status"] == "failed")
    with running_server(batch_dir=tmp_path) as server:
        answers, errors = outcome(server, ended(server, batch_id))
        assert (set(answers), set(errors)) == ({"a"}, {"b"})
        assert server.metric("jaxserve_output_tokens_total") == 0


def test_two_servers_do_not_work_on_one_folder(tmp_path, caplog):
    with running_server(batch_dir=tmp_path) as first, running_server(batch_dir=tmp_path) as second:
        assert first.request("GET", "/v1/files").status == 200
        reply = second.request("GET", "/v1/files")
        assert (reply.status, "another server" in reply.error["message"]) == (503, True)
        assert second.complete("abc").text() == "abc"


# Files


def test_a_file_comes_back_as_it_was_and_goes_when_deleted(server):
    raw = bytes(range(256)) * 1000
    file_id = upload(server, raw)
    shown = server.request("GET", f"/v1/files/{file_id}").json
    assert (shown["filename"], shown["purpose"]) == ("in.jsonl", "batch")
    assert server.request("GET", f"/v1/files/{file_id}/content").body == raw
    reply = server.request("DELETE", f"/v1/files/{file_id}")
    assert reply.json == {"id": file_id, "object": "file", "deleted": True}
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert server.request("GET", path).status == 404
    assert server.request("DELETE", f"/v1/files/{file_id}").status == 404


def test_files_are_listed_in_pieces(server):
    ids = [upload(server, b"x") for _ in range(5)]
    asked = "/v1/files?purpose=batch&limit=2"
    first = server.request("GET", asked).json
    assert [file["id"] for file in first["data"]] == [ids[4], ids[3]]
    assert (first["has_more"], first["last_id"]) == (True, ids[3])
    second = server.request("GET", f"{asked}&after={ids[3]}").json
    assert [file["id"] for file in second["data"]] == [ids[2], ids[1]]
    oldest = server.request("GET", "/v1/files?order=asc").json["data"]
    assert [file["id"] for file in oldest][-5:] == ids
    assert server.request("GET", "/v1/files?purpose=fine-tune").json["data"] == []


@pytest.mark.parametrize(
    "query, param",
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
        ("color=red", "color"),
    ],
)
def test_other_lists_are_refused(server, query, param):
    refusal(server.request("GET", f"/v1/files?{query}"), param)


@pytest.mark.parametrize(
    "body, headers, param",
    [
        (b"{}", {"Content-Type": "application/json"}, None),
        (b"", {}, None),
        (b"", {"Content-Type": "multipart/form-data"}, None),
        (b"", FORM, None),
        (b"nonsense", FORM, None),
        (f"--{BOUNDARY}\r\n-2.6+16--{BOUNDARY}--\r\n".encode(), FORM, None),
        (form(b"x")[:-30], FORM, None),
        (form(b"x" * 100)[:-60], FORM, None),
        (form(b"x", purpose="fine-tune"), FORM, "purpose"),
        (form(b"x").replace(b"in.jsonl", b"\xff.jsonl"), FORM, "file"),
        (form(b"x").replace(b'"purpose"', b'"\xff"'), FORM, None),
        (form(b"x", purpose="b" * 2000), FORM, "purpose"),
        (form(b"x").replace(b'"purpose"', b'"other"'), FORM, "other"),
        (form(b"x").replace(b'"file"', b'"purpose"'), FORM, "purpose"),
        (
            form(b"x")[: form(b"x").index(b"batch") + 5] + f"\r\n--{BOUNDARY}--\r\n".encode(),
            FORM,
            "file",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
def test_what_is_no_upload_is_refused_and_leaves_nothing(server, body, headers, param):
    before = server.request("GET", "/v1/files").json
    reply = server.request("POST", "/v1/files", body, headers)
    assert reply.status == 400, reply.body
    if param:
        refusal(reply, param)
    assert server.request("GET", "/v1/files").json == before
    folder = server.service.config.batch_dir / "files"
    assert not list(folder.glob("*.part"))


def test_too_large_and_too_many_files_are_refused(server, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_FILE_BYTES", 100)
    refusal(server.request("POST", "/v1/files", form(b"x" * 101), FORM), "file")
    upload(server, b"x" * 100)
    monkeypatch.setattr(file_store, "MAX_FILES", 1)
    assert "delete some" in refusal(server.request("POST", "/v1/files", form(b"x"), FORM), "file")


def put_file(store, owner, size):
    with Upload(store, owner) as upload:
        upload.write(b"x" * size)
        upload.sync()
        return upload.finish("in.jsonl").id


def test_one_key_cannot_fill_the_server_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_TOTAL_BYTES", 400)
    store = FileStore(tmp_path)
    first = put_file(store, "ann", 60)
    with pytest.raises(RequestError, match="an API key keeps up to 2500 files"):
        put_file(store, "ann", 41)
    put_file(store, "bob", 100)
    with Upload(store, "eve") as on_its_way:  # what is not there yet takes room as well
        on_its_way.write(b"x" * 100)
        with pytest.raises(RequestError, match="delete some"):
            put_file(store, "eve", 1)
    put_file(store, "eve", 100)
    for same in (store, FileStore(tmp_path)):  # counted anew when a server starts
        for owner, size in (("ann", 41), ("bob", 1)):
            with pytest.raises(RequestError):
                put_file(same, owner, size)
    store.delete(first, "ann")
    put_file(store, "ann", 100)
    put_file(store, "dan", 100)
    with pytest.raises(RequestError, match="of all its API keys"):
        put_file(store, "fay", 1)
    assert not list(tmp_path.glob("*.part"))


def test_without_keys_one_may_have_all(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_TOTAL_BYTES", 400)
    store = FileStore(tmp_path)
    put_file(store, "", 400)
    with pytest.raises(RequestError, match="this server keeps"):
        put_file(store, "", 1)


def test_one_key_cannot_have_all_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 8)
    store = BatchStore(tmp_path)
    mine = [store.create(COMPLETIONS, "file-x", None, "ann") for _ in range(2)]
    with pytest.raises(Overloaded, match="2 batches of this API key"):
        store.create(COMPLETIONS, "file-x", None, "ann")
    others = [store.create(COMPLETIONS, "file-x", None, name) for name in "bbccdd"]
    for record in (*others, *mine):
        record.batch = msgspec.structs.replace(record.batch, status="completed")
    store.create(COMPLETIONS, "file-x", None, "ann")
    left = [record.owner for record in store.records.values()]
    assert left == ["ann", *"bbccdd", "ann"]  # her own oldest made room


def test_a_batch_that_the_disk_has_no_room_for_does_not_exist(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    store = BatchStore(tmp_path)
    monkeypatch.setattr(batch_store, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        store.create(COMPLETIONS, "file-x", None, "ann")
    assert not store.records


def test_a_batch_that_nobody_works_on_is_cancelled_by_the_next_server(tmp_path):
    runner = BatchRunner(web.Application(), tmp_path, concurrency=1)
    record = runner.batches.create(COMPLETIONS, "file-x", None, "")
    runner.cancel(record)
    assert BatchStore(tmp_path / "batches").records[record.batch.id].batch.status == "cancelling"


def test_a_file_is_not_deleted_while_a_batch_reads_it(server):
    file_id = upload(server, [line(str(i), [SLOW] * 40) for i in range(50)])
    ask = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch_id = server.post("/v1/batches", ask).json["id"]
    assert batch_id in refusal(server.request("DELETE", f"/v1/files/{file_id}"), "file_id")
    server.post(f"/v1/batches/{batch_id}/cancel", b"")
    ended(server, batch_id)
    assert server.request("DELETE", f"/v1/files/{file_id}").status == 200


# Who may see what, and refusals


def test_files_and_batches_are_their_key_s_own(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: a-key\nbob: b-key\n")
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("a-key", "b-key"))
    with running_server(batch_dir=tmp_path / "batches", keys=Keys(file)) as server:
        batch_id = begin(server, [line("a")], **ann)
        path = f"/v1/batches/{batch_id}"
        done = lambda: server.request("GET", path, headers=ann).json["status"] == "completed"  # noqa: E731
        assert server.becomes(done)
        batch = server.request("GET", path, headers=ann).json
        own = [path, *(f"/v1/files/{batch[name]}" for name in ("input_file_id", "output_file_id"))]
        for path in own:
            assert server.request("GET", path, headers=ann).status == 200
            assert server.request("GET", path, headers=bob).status == 404
            assert server.request("GET", path).status == 401
        for path in ("/v1/files", "/v1/batches"):
            assert server.request("GET", path, headers=bob).json["data"] == []
            assert server.request("GET", path, headers=ann).json["data"] != []
        ask = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS}
        assert server.post("/v1/batches", ask | {"completion_window": "24h"}, **bob).status == 404
        assert server.metric('jaxserve_key_requests_total{key="ann",outcome="ok"}') > 0


@pytest.mark.parametrize(
    "change, param",
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"priority": 3}, "priority"),
    ],
)
def test_other_batches_are_refused(server, change, param):
    ask = {
        "input_file_id": upload(server, [line("a")]),
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    refusal(server.post("/v1/batches", ask | change), param)


def test_what_is_not_there_is_not_found(server):
    ask = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert server.post("/v1/batches", ask).status == 404
    assert server.request("GET", "/v1/batches/batch_x").status == 404
    assert server.post("/v1/batches/batch_x/cancel", b"").status == 404


def test_the_oldest_batch_that_has_ended_makes_room(server, monkeypatch):
    first = begin(server, [line("a")])
    ended(server, first)
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 1)
    begin(server, [line("a")])
    batches = server.request("GET", "/v1/batches?limit=100").json["data"]
    while len(batches) > 1:  # those of other tests make room as well
        ended(server, batches[0]["id"])
        begin(server, [line("a")])
        batches = server.request("GET", "/v1/batches?limit=100").json["data"][: len(batches) - 1]
    assert server.request("GET", f"/v1/batches/{first}").status == 404


def test_a_server_without_a_folder_says_so():
    with running_server() as server:
        for path in ("/v1/files", "/v1/batches"):
            reply = server.request("GET", path)
            assert (reply.status, "--batch-dir" in reply.error["message"]) == (404, True)


# The client library


def test_the_openai_library_s_own_way(server, tmp_path):
    openai = pytest.importorskip("openai")
    base_url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        path = tmp_path / "in.jsonl"
        chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
        request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
        path.write_bytes(jsonl([request | {"body": chat | {"temperature": 0}}]))
        with path.open("rb") as content_file:
            file = client.files.create(file=content_file, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"night": "one"},
        )
        assert server.becomes(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        (answer,) = client.files.content(batch.output_file_id).text.splitlines()
        assert json.loads(answer)["response"]["body"]["choices"][0]["message"]["content"] == "hi>"
        assert batch.metadata == {"night": "one"}
        assert batch.id in [found.id for found in client.batches.list(limit=1)]
        assert file.id in [found.id for found in client.files.list(limit=2)]
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
