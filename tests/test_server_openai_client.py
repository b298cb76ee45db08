"""The official client library against the server: what it sends is understood, and the reverse."""

from pathlib import Path

import pytest
from toy_model import MODEL_NAME
from toy_server import TIMEOUT, running_server
from toy_worker import DIE, SLOW

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    base_url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(
        base_url=base_url, api_key="unused", timeout=TIMEOUT, max_retries=0
    ) as client:
        yield client


def test_chat_streamed_and_not(client):
    ask = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == "hello>"
    assert whole.usage.completion_tokens == 7
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**ask, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello>"
    assert chunks[-1].usage == whole.usage


def test_completions_with_logprobs(client):
    reply = client.completions.create(
        model=MODEL_NAME, prompt="abc", temperature=0, logprobs=2, extra_body={"top_k": 5}
    )
    assert reply.choices[0].text == "abc"
    assert reply.choices[0].logprobs.tokens == ["a", "b", "c", "<eos>"]


def test_chat_logprobs(client):
    reply = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = reply.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["h", "i", ">", "<eos>"]
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL_NAME]


def test_errors_become_the_library_s_own(client):
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.completions.create(model=MODEL_NAME, prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


def test_a_stream_that_breaks_off_raises(server, client):
    stream = client.completions.create(
        model=MODEL_NAME, prompt=[*b"ab", SLOW, DIE], temperature=0, stream=True
    )
    with pytest.raises(openai.APIError, match=r"process ended|exited with code 3"):
        list(stream)
    assert server.becomes(lambda: server.request("GET", "/health").status == 200)


def test_no_module_of_the_server_imports_jax():
    # Run in the process of test_server_shutdown as well; here for a message with the file's name.
    root = Path(__file__).parent.parent
    for path in sorted((root / "jaxserve" / "server").glob("*.py")):
        lines = path.read_text().splitlines()
        imports = [line for line in lines if line.startswith(("import ", "from "))]
        assert not [line for line in imports if "jax" in line.replace("jaxserve", "")], path
