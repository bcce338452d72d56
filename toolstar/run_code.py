"""
The interpreter on another machine: SandboxFusion's POST /run_code, from both sides [1].

    (1) Remote   stands in the place of a Jail, and sends programs to a server: this one, or theirs
    (2) serve    answers as theirs does, by the jail of this machine

Reads and writes nothing: programs and their output pass through.

    python -m toolstar.jail serve --port 8080     and on the other side, in tools.json:
    "python": "http://that-machine:8080/run_code"

[1] SandboxFusion, arXiv:2412.00535
"""
import sys

from toolstar.jail import Result, read_error


class Remote:
    """A SandboxFusion server in the place of a Jail. It shows no value of a bare expression."""
    level = "remote"

    def __init__(self, url, seconds=5.0):
        import httpx2
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.seconds, self.client = seconds, httpx2.Client(trust_env=False)
        self.failure = httpx2.HTTPError

    def run(self, program, stdin="", seconds=None):
        """As a Jail's: two tries, then "broken"."""
        seconds, why = self.seconds if seconds is None else seconds, ""
        # JSON can hold half a surrogate pair, and a server refuses it
        code, stdin = (text.encode("utf-8", "replace").decode() for text in (program, stdin))
        body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": seconds}
        for _ in "first", "again":
            try:
                reply = self.client.post(self.url, json=body, timeout=seconds + 30)
                return read_reply(reply.json(), seconds)
            except (self.failure, ValueError, KeyError, TypeError) as error:
                why = f"{self.url}: {error!r}"
        return Result("broken", "", "", why, 0.0)

    def close(self):
        self.client.close()


def read_reply(reply, seconds):
    """SandboxFusion's JSON -> Result; ValueError, KeyError or TypeError where it is none."""
    if reply["status"] == "SandboxError":
        raise ValueError(reply.get("message") or "SandboxError")
    done = reply["run_result"]
    out, err = done["stdout"] or "", done["stderr"] or ""
    status, error = "ok", ""
    if done["status"] == "TimeLimitExceeded":
        status, error = "timeout", f"stopped after {seconds:g} s"
    elif reply["status"] != "Success":
        status, error = read_error(done.get("return_code"), err)
    return Result(status, out, err, error, float(done.get("execution_time") or 0))


def write_reply(result):
    """Result -> SandboxFusion's JSON."""
    if result.status == "broken":
        return {"status": "SandboxError", "message": result.error}
    good, late = result.status == "ok", result.status == "timeout"
    # what is no traceback, such as a kill, is said all the same
    told = result.error if result.status in ("killed", "output") else result.stderr
    return {"status": "Success" if good else "Failed", "message": "", "run_result": {
        "status": "TimeLimitExceeded" if late else "Finished", "execution_time": result.seconds,
        "return_code": None if late else int(not good), "stdout": result.stdout, "stderr": told}}


def serve(jail, host, port):
    """Answer POST /run_code until stopped."""
    import fastapi
    import pydantic
    import uvicorn

    class Request(pydantic.BaseModel):
        code: str
        language: str = "python"
        stdin: str | None = ""
        run_timeout: float = jail.seconds
        files: dict = {}

    app = fastapi.FastAPI()

    @app.post("/run_code")
    def run_code(asked: Request):
        if asked.language != "python" or asked.files:
            return {"status": "SandboxError", "message": "python alone runs here, without files"}
        seconds = min(asked.run_timeout, jail.seconds)
        return write_reply(jail.run(asked.code, asked.stdin or "", seconds))

    print(f"jail.py: {jail.level}, http://{host}:{port}/run_code", file=sys.stderr)
    uvicorn.run(app, host=host, port=port, log_level="warning")
