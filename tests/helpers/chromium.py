"""Drives headless Chromium through its DevTools protocol, over a pair of pipes."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-extensions",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page in a browser; keeps what it requests and complains of."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        take, self._out = os.pipe()  # from us to the browser, which reads 3 and writes 4
        self._in, give = os.pipe()

        def place():
            held = os.dup(give), os.dup(take)  # neither is overwritten by the other
            os.dup2(held[1], 3)
            os.dup2(held[0], 4)

        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=place, close_fds=False, env={**os.environ, "HOME": self._folder.name},
        )  # fmt: skip
        os.close(take)
        os.close(give)
        self._buffer, self._number, self._session = b"", 0, None
        self.requests, self.complaints, self._events = [], [], set()
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = None
        with contextlib.suppress(OSError, EOFError):
            self("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._in, self._out):
            os.close(end)
        self._folder.cleanup()

    def __call__(self, method, **params):
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]

    def _read(self, seconds=60):
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            part = os.read(self._in, 1 << 20)
            if not part:
                raise EOFError("the browser is gone")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(line)
        self._note(found.get("method"), found.get("params", {}))
        return found

    def _note(self, method, params):
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")
        if method:
            self._events.add(method)

    def size(self, width, height=900, dark=False):
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path):
        """Loads a file and waits until it is there."""
        self.requests.clear()
        self.complaints.clear()
        self._events.discard("Page.loadEventFired")
        self("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", new=False)

    def wait_for(self, event, new=True):
        """Waits until an event has happened; if `new`, once more from now on."""
        if new:
            self._events.discard(event)
        while event not in self._events:
            self._read()

    def js(self, expression):
        """The value of an expression of JavaScript; of a promise, what it comes to."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, file, whole=True):
        found = self("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))
