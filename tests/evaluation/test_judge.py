"""judge.py against servers that are broken or hostile: the key, redirects, deadlines, addresses."""

import contextlib
import http.server
import json
import os
import signal
import threading
import time
import urllib.parse

import pytest

import eval as front
from evaluation import judge
from utils import UserError

KEY = 'sk-loop"back\\+secret/0123456789'
GOOD = json.dumps({"choices": [{"message": {"content": "A"}}]})


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, code, text, **headers):
        body = text if isinstance(text, bytes) else text.encode()
        self.send_response(code)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.question = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with self.server.lock:
            self.server.asked.append(self)
        with contextlib.suppress(OSError):  # the client may leave
            self.server.respond(self)

    def do_GET(self):  # what urllib makes of a redirected question
        with self.server.lock:
            self.server.asked.append(self)
        self.send(200, GOOD)


@pytest.fixture
def serve():
    """serve(respond) -> a loopback server with `url` and `asked`; respond(handler) answers."""
    servers = []

    def start(respond):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.respond, server.asked, server.lock = respond, [], threading.Lock()
        server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server, key=KEY, **options):
    return judge.Endpoint(server.url, "j", key, **{"timeout": 5, "retries": 0} | options)("which?")


@contextlib.contextmanager
def within(seconds):
    """The block must end in time, and leave no thread behind that keeps the process alive."""
    before, started = {*threading.enumerate()}, time.monotonic()
    yield
    assert time.monotonic() - started < seconds
    assert not [thread for thread in threading.enumerate()
                if thread not in before and not thread.daemon]


def no_key_in(text):
    assert not [KEY[i:i + 8] for i in range(len(KEY) - 7) if KEY[i:i + 8] in text], text


# --- the key --------------------------------------------------------------------------------------

def test_blanks_around_the_key_are_not_part_of_it(serve):
    server = serve(lambda handler: handler.send(200, GOOD))
    assert ask(server, key=f" {KEY}\r\n") == (1.0, "A")
    assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", ["", "\n", KEY + "\n" + KEY, KEY + " x", KEY + "é"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(serve, refused, key):
    line = refused(lambda: ask(serve(lambda handler: handler.send(200, GOOD)), key=key))
    assert "the judge's key is empty, or a space" in line
    no_key_in(line)


def echo(handler, code=200, before="", **headers):
    handler.send(code, before + handler.headers["Authorization"], **headers)


def echo_in_json(handler):
    handler.send(200, json.dumps({"choices": [
        {"message": {"content": handler.headers["Authorization"]}}]}))


def echo_in_headers(handler):
    handler.wfile.write(f"HTTP/1.1 {handler.headers['Authorization']}\r\n\r\n".encode())


@pytest.mark.parametrize("respond", [
    echo, echo_in_json, echo_in_headers, lambda h: echo(h, 400), lambda h: echo(h, 401),
    lambda h: echo(h, 500), lambda h: echo(h, 400, "x" * 280), lambda h: echo(h, 429, "é" * 140),
    lambda h: h.send(403, json.dumps({"error": h.headers["Authorization"]})),
    lambda h: h.send(400, json.dumps(h.headers["Authorization"]).replace("/", "\\/")),
    lambda h: h.send(400, h.headers["Authorization"].replace("+", "\\u002B").upper()),
    lambda h: h.send(400, urllib.parse.quote(h.headers["Authorization"], safe="")),
    lambda h: h.send(302, "", Location=f"http://elsewhere/?{h.headers['Authorization'][7:]}")])
def test_no_text_of_a_server_shows_the_key(serve, respond):
    try:
        preference, text = ask(serve(respond))
    except UserError as error:
        preference, text = None, str(error)
    assert preference is None and text
    for seen in (text, text.replace("\\", ""), urllib.parse.unquote(text), text.lower()):
        no_key_in(seen)


def test_a_key_in_the_place_of_its_variables_name_is_not_shown(refused):
    assert "OPENAI_API_KEYS is not set" in refused(lambda: judge.read_key("OPENAI_API_KEYS"))
    line = refused(lambda: judge.read_key("sk-0123456789"))
    assert "--key-variable" in line and "0123456789" not in line


def test_the_environments_key_is_stripped(monkeypatch, refused):
    monkeypatch.setenv("JUDGE_KEY", "abc\n")
    assert judge.read_key("JUDGE_KEY") == "abc"
    monkeypatch.setenv("JUDGE_KEY", " \n")
    assert "JUDGE_KEY is not set" in refused(lambda: judge.read_key("JUDGE_KEY"))


# --- redirects ------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", judge.REDIRECTS)
def test_the_key_goes_to_no_other_origin(serve, refused, code):
    other = serve(lambda handler: handler.send(200, GOOD))
    server = serve(lambda handler: handler.send(
        code, "", Location=f"{other.url}/chat/completions"))
    line = refused(lambda: ask(server, retries=3))
    assert f"redirects to {other.url}/chat/completions, another server" in line
    assert not other.asked and len(server.asked) == 1


@pytest.mark.parametrize("location", [
    "https://127.0.0.1:{port}/v1", "http://localhost:{port}/v1", "//127.0.0.1/v1", "http://[::1",
    "ftp://127.0.0.1:{port}/v1", "file:///etc/passwd", "http://127.0.0.1:{port}x/v1", ""])
def test_another_scheme_host_or_port_is_another_origin(serve, refused, location):
    server = serve(lambda handler: handler.send(
        307, "", Location=location.format(port=handler.server.server_address[1])))
    assert "another server" in refused(lambda: ask(server))
    assert len(server.asked) == 1


def test_a_redirect_within_the_origin_is_followed_with_the_question(serve):
    def respond(handler):
        if handler.path == "/v1/chat/completions":
            return handler.send(308, "", Location="/v2/chat")
        handler.send(200, GOOD)
    server = serve(respond)
    assert ask(server) == (1.0, "A")
    first, second = server.asked
    assert (second.command, second.path) == ("POST", "/v2/chat")
    assert second.question == first.question and "which?" in second.question


def test_redirects_in_a_circle_end(serve, refused):
    server = serve(lambda handler: handler.send(302, "", Location=handler.path))
    assert "redirects more than 5 times" in refused(lambda: ask(server))


# --- deadlines and sizes --------------------------------------------------------------------------

def drip(handler, text, seconds=4.0):
    for byte in text.encode():
        handler.wfile.write(bytes([byte]))
        time.sleep(seconds / len(text))


@pytest.mark.parametrize("part", ["head", "body", "chunks", "refusal"])
def test_the_deadline_is_for_the_whole_reply(serve, part):
    """A byte every tenth of a second: no single read is slow."""
    def respond(handler):
        if part == "head":
            return drip(handler, "HTTP/1.1 200 OK\r\nX-Slow: 0123456789012345\r\n\r\n")
        handler.send_response(500 if part == "refusal" else 200)
        handler.send_header(*(("Transfer-Encoding", "chunked") if part == "chunks"
                              else ("Content-Length", 10**6)))
        handler.end_headers()
        drip(handler, "1\r\n{\r\n" * 7 if part == "chunks" else "x" * 40)
    server = serve(respond)
    with within(1.5):
        preference, problem = ask(server, timeout=0.4)
    assert preference is None
    assert problem.startswith("HTTP 500 x" if part == "refusal" else "no whole reply within")


def test_a_refused_key_is_known_before_the_refusals_text_has_come(serve, refused):
    def respond(handler):
        handler.send(401, "wrong k", Content_Length=100)
        time.sleep(2)
    with within(1.5):
        assert "HTTP 401 wrong k" in refused(lambda: ask(serve(respond), timeout=0.4))


def test_a_huge_reply_is_not_read(serve):
    written = []

    def respond(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(600 * 2**20))
        handler.end_headers()
        for _ in range(64):
            written.append(handler.wfile.write(b"x" * 2**20))
    with within(4):
        preference, problem = ask(serve(respond), retries=5)
    assert preference is None and "more than 1,048,576 bytes" in problem
    assert len(written) < 32  # what the sockets hold, and no more


def test_a_reply_nested_without_end_is_unreadable(serve):
    assert ask(serve(lambda handler: handler.send(200, "[" * 10**5)))[0] is None


def test_a_question_waits_so_long_in_all(serve, monkeypatch):
    server = serve(lambda handler: handler.send(429, "slow down", Retry_After="1000"))
    monkeypatch.setattr(judge, "MAX_WAITING", 299.0)
    with within(2):
        assert ask(server, retries=5) == (None, "HTTP 429 slow down")
    monkeypatch.setattr(judge, "MAX_PAUSE", 0.05)
    assert ask(server, retries=5) == (None, "HTTP 429 slow down")
    assert len(server.asked) == 1 + 6


def test_a_wait_is_twice_as_long_each_time(monkeypatch):
    """And a little more, for all threads not to come back at one time."""
    endpoint, waits = judge.Endpoint("http://x/v1", "j", "key", retries=4, wait=0.5), []

    def trouble(body):
        raise judge.TryAgain("busy")

    monkeypatch.setattr(endpoint, "ask_once", trouble)
    monkeypatch.setattr(endpoint.stopped, "wait", waits.append)
    assert endpoint("A or B?") == (None, "busy") and len(waits) == 4
    assert all(1 <= pause / (0.5 * 2**n) <= 1.25 for n, pause in enumerate(waits))


def pairs(count):
    return [{"instruction": f"question {n}", "output_1": "x", "output_2": "y"} for n in
            range(count)]


@pytest.mark.parametrize("parallel", [1, 4])
def test_ctrl_c_does_not_wait_for_a_server(serve, tmp_path, parallel, request):
    """While every thread obeys a Retry-After."""
    # A shell that starts the tests in the background makes Python ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    once = threading.Lock()  # several threads may see the last question; one Ctrl-C is sent

    def respond(handler):
        handler.send(429, "slow down", Retry_After="20")
        if len(handler.server.asked) == parallel and once.acquire(blocking=False):
            time.sleep(0.3)  # until the last reply is read
            os.kill(os.getpid(), signal.SIGINT)
    endpoint = judge.Endpoint(serve(respond).url, "j", KEY)
    with within(3), pytest.raises(KeyboardInterrupt):
        judge.judge_pairs(pairs(8), endpoint, judge.Cache(tmp_path / "cache"), parallel)
    assert endpoint.stopped.is_set()


def test_a_refused_key_ends_the_waits_of_the_others(serve, tmp_path, refused):
    def respond(handler):
        if "question 3" in handler.question:
            time.sleep(0.3)  # the others wait by now
            return handler.send(401, "no")
        handler.send(429, "slow down", Retry_After="20")
    endpoint = judge.Endpoint(serve(respond).url, "j", KEY)
    with within(3):
        line = refused(lambda: judge.judge_pairs(
            pairs(4), endpoint, judge.Cache(tmp_path / "cache"), parallel=8))
    assert "refuses every question (HTTP 401 no)" in line
    for _ in range(100):  # the threads that waited are over, too
        if not [thread for thread in threading.enumerate() if "(work)" in thread.name]:
            break
        time.sleep(0.02)
    else:
        raise AssertionError("a thread still waits")


# --- the command line -----------------------------------------------------------------------------

def write(tmp_path, name, rows):
    (tmp_path / name).write_text(json.dumps(
        [{"instruction": instruction, "output": output} for instruction, output in rows]))
    return str(tmp_path / name)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command(outputs, reference, url, *flags): `eval.py winrate judge` on pairs of texts."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")

    def call(outputs, reference, url, *flags):
        front.main(["winrate", "judge", write(tmp_path, "outputs.json", outputs), "--reference",
                      write(tmp_path, "reference.json", reference), "--out",
                      str(tmp_path / "out.json"), "--url", url, "--judge", "j", *flags])
        return json.loads((tmp_path / "out.json").read_text())
    return call


@pytest.mark.parametrize("url, said", [
    ("api.openai.com/v1", "begins with neither http:// nor https://"),
    ("localhost:8000/v1", "begins with neither"), ("ftp://host/v1", "begins with neither"),
    ("file:///etc/passwd", "begins with neither"), ("http://", "names no host"),
    ("https:///v1", "names no host"), ("http://:80/v1", "names no host"),
    ("http://ho st/v1", "a space or a character"), (" http://host/v1", "a space or a character"),
    ("http://host/v1\n", "a space or a character"), ("http://hóst/v1", "a space or a character"),
    ("http://host:port/v1", "port cannot be read"), ("http://host:99999", "port cannot be read"),
    ("http://[::1/v1", "port cannot be read"), ("http://me:hidden@host/v1", "a user name"),
    ("https://host/v1?key=hidden", "goes on behind ?"), ("https://host/v1#hidden", "behind ? or #"),
])
def test_a_bad_address_is_one_line(command, refused, url, said):
    with within(2):
        line = refused(lambda: command([("a", "x")], [("a", "y")], url))
    assert line.startswith("error: --url") and said in line and "https://host/v1" in line
    assert "hidden" not in line and ("hidden" in url or url.strip().split()[0] in line)


@pytest.mark.parametrize("flag, value", [
    ("--timeout", "0"), ("--timeout", "-1"), ("--timeout", "nan"), ("--timeout", "1e300"),
    ("--wait", "-1"), ("--wait", "601")])
def test_bad_seconds_are_one_line(command, refused, flag, value):
    line = refused(lambda: command([("a", "x")], [("a", "y")], "http://127.0.0.1:9/v1", flag,
                                   value))
    assert line.startswith(f"error: {flag} ") and "must lie in" in line


def test_rows_without_a_partner_and_doubled_ones_are_said_by_number(command, serve, capfd):
    server = serve(lambda handler: handler.send(200, GOOD))
    outputs = [("a", "1"), ("only here", "2"), ("b", "3"), ("a", "4"), ("c", "5"), ("b", "6")]
    reference = [("b", "x"), ("a", "y"), ("c", "z"), ("only there", "w"), ("a", "v")]
    made = command(outputs, reference, server.url)
    assert [(row["instruction"], row["output_2"], row["output_1"]) for row in made] == [
        ("a", "1", "y"), ("b", "3", "x"), ("a", "4", "v"), ("c", "5", "z")]
    text = capfd.readouterr().out
    assert "2 of 6 outputs have no answer in the reference and are not judged: rows 2, 6\n" in text
    assert "1 of 5 answers of the reference have no output and are not used: rows 4\n" in text
    assert "2 of 6 rows of the outputs repeat an instruction: rows 4, 6\n" in text
    assert "1 of 5 rows of the reference repeat an instruction: rows 5\n" in text
    command(outputs[:1], reference[1:2], server.url)
    assert "warning" not in capfd.readouterr().out
