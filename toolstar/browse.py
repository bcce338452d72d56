"""
The browser of the tools world: fetch a URL that a language model wrote and return text.

    (1) connect   resolve the host once, refuse it if any of its addresses is not public, and
                  connect to one of these, so that a name server cannot give another one afterwards
    (2) fetch     send the request, follow redirects (each is judged anew), limit size and time
    (3) extract   read HTML and text by a fixed program in the jail
    (4) passages  choose the paragraphs that match the query best, by BM25

This file decides what a model can reach: http and https on ports 80 and 443, no proxies, no
cookies, no scripts. The caller must escape the text, which comes from strangers.

Reads   the network, within the rules above     Writes  nothing

    browser = toolstar.browse.Browser(Jail(preload=("trafilatura",)), allow=["127.0.0.1:8123"])
    browser.read("http://127.0.0.1:8123/lakes.html", "how deep is Lake Mol?")
"""
import base64
import http.client
import io
import ipaddress
import json
import math
import re
import socket
import ssl
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urljoin, urlsplit

HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; STAR)", "Accept": "text/html,text/plain,*/*",
           "Accept-Encoding": "identity", "Connection": "close"}
HOST = re.compile(r"[0-9a-z_][0-9a-z_.-]*|[0-9a-f:.]+")  # a name, or the inside of [IPv6]
READABLE = re.compile(r"text/.*|application/(xhtml\+xml|json|xml)|application/.*\+(json|xml)")
PORTS = (80, 443)  # of http and https
KEPT = "%/:?#[]@!$&'()*+,;=~"  # characters of a path and a query that are sent as they are
# IANA's special-purpose registries, written out because is_global changes with Python's version;
# 168.63.129.16 looks public, but is a service inside of Azure's networks
FORBIDDEN = [ipaddress.ip_network(network) for network in (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
    "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32",
    # the first two, Teredo and 6to4, embed IPv4 addresses
    "2001::/23", "2002::/16", "2001:db8::/32", "3fff::/20")]
# all other IPv6 is loopback, link-local, unique local, multicast or unassigned; of NAT64 addresses
# the last 32 bits are an IPv4 address
UNICAST, NAT64 = map(ipaddress.ip_network, ("2000::/3", "64:ff9b::/96"))


class PageError(ValueError):
    """What is wrong with a page, a URL or a host, in one line that the model may read."""


class BrowserBroken(RuntimeError):
    """The jail that reads pages is broken; the page is not at fault."""


def is_public(text):
    """Whether a text is a numeric address on the public internet."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if getattr(address, "ipv4_mapped", None) or address in NAT64:
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    # with a zone (%), any IPv6 address is link-local
    inside = address.version == 6 and address not in UNICAST or "%" in text
    return not inside and not any(address in network for network in FORBIDDEN)


def split_url(url):
    """(whether it is https, host, port, path and query) of a URL that may be read; else PageError.
    Other letters than ASCII's are encoded, as browsers do."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:
        raise PageError("is not a URL: write it as http://host/path") from None
    if parts.scheme not in ("http", "https") or not HOST.fullmatch(host) or not url.isprintable():
        raise PageError("is not a web page: write it as http://host/path")
    if parts.username is not None or parts.password is not None:
        raise PageError("holds a user name: leave out what stands before the @")
    secure = parts.scheme == "https"
    target = (parts.path or "/") + f"?{parts.query}" * bool(parts.query)
    return secure, host, PORTS[secure] if port is None else port, quote(target, KEPT)


READER = r"""
import base64, json, re, sys, trafilatura
from trafilatura.utils import decode_file
page = json.load(sys.stdin)
data = base64.b64decode(page["data"])
title, text, fault = "", "", ""

def decode():
    said = re.search(rb"charset=[\"']?([\w-]+)", data[:1024])
    for name in ("utf-8", page["charset"], said[1].decode().lower() if said else ""):
        try:  # like all browsers, read "Latin-1" as Windows' variant of it
            return data.decode({"iso-8859-1": "cp1252"}.get(name, name))
        except (LookupError, ValueError):
            pass
    return decode_file(data)

def clean(text):
    text = re.sub(r"[^\S\n]+", " ", text)
    return "".join(c for c in text if c == "\n" or c.isprintable()).strip()

text = decode()
if 10 * len(re.findall(r"[\x00-\x08\x0e-\x1f\ufffd]", text)) > len(text):
    fault = "is no text: binary data"
elif page["html"]:
    text = text if "<html" in text.lower() else f"<html><body>{text}</body></html>"
    tree = trafilatura.load_html(text)
    title = "" if tree is None else tree.findtext(".//title") or ""
    # fast=True: the other methods would load word lists for 0.2 s in every fork
    found = trafilatura.extract(tree, fast=True, favor_recall=True, include_comments=False)
    text = found or trafilatura.html2txt(text)
title = " ".join(clean(title).split())[:200]
text = clean(text)[:page["text"]].encode()[:48_000].decode(errors="ignore")
print(json.dumps([title, text, fault], ensure_ascii=False))
"""


def choose_passages(text, query, limit):
    """The paragraphs that match a query best, in page order, at most `limit` characters in all.

    Scores paragraphs by BM25 (k1 1.2, b 0.75); long ones are cut at a quarter of the limit. The
    earlier of two equal paragraphs wins, so without a match the page's start is returned.
    """
    parts = [part for line in text.splitlines()
             for part in textwrap.wrap(line, max(limit // 4 - 3, 1), break_on_hyphens=False)]
    bags = [Counter(re.findall(r"\w+", part.lower())) for part in parts]
    wanted = set(re.findall(r"\w+", query.lower()))
    holding = Counter(word for bag in bags for word in wanted & bag.keys())
    rarity = {word: math.log(1 + (len(bags) - n + 0.5) / (n + 0.5)) for word, n in holding.items()}
    mean = sum(bag.total() for bag in bags) / max(len(bags), 1) or 1
    scores = [math.fsum(rarity[word] * bag[word] * 2.2 /
                        (bag[word] + 1.2 * (0.25 + 0.75 * bag.total() / mean))
                        for word in wanted & bag.keys()) for bag in bags]
    # half of a paragraph's score also goes to the next one: the text below a matching heading
    scores = [score + before / 2 for score, before in zip(scores, [0.0, *scores], strict=False)]
    chosen = set()
    for i in sorted(range(len(parts)), key=lambda i: -scores[i]):
        limit -= len(parts[i]) + 3  # for the line break and perhaps the mark of a gap
        if limit < 0:
            break
        chosen.add(i)
    return "\n".join(parts[i] if i - 1 in chosen or not i else "…\n" + parts[i]
                     for i in sorted(chosen))


class Browser:
    """Reads pages for a language model, from any number of threads.

    jail      a Jail whose workers have trafilatura; the caller closes it
    allow     "host:port" pairs that are exempt from the rules on ports and addresses
    seconds   time limit of a read: lookups, connections, redirects, body and extraction together
    """

    def __init__(self, jail, allow=(), seconds=10.0, max_bytes=5_000_000, redirects=5, text=20_000,
                 passages=2_000, resolve=socket.getaddrinfo):
        self.jail, self.allow = jail, frozenset(pair.lower() for pair in allow)
        self.seconds, self.max_bytes, self.redirects = seconds, max_bytes, redirects
        self.text, self.passages, self.resolve = text, passages, resolve
        self.lookups, self.tls = ThreadPoolExecutor(64, "lookup"), ssl.create_default_context()

    def close(self):
        self.lookups.shutdown(wait=False, cancel_futures=True)

    def read(self, url, query="", passages=None):
        """The title and the passages of a page. Raises PageError if the page is at fault,
        BrowserBroken if the jail is."""
        end = time.monotonic() + self.seconds
        try:
            page = self.fetch(url.strip(), end)
            title, text = self.extract(page, end - time.monotonic())
        except (http.client.HTTPException, OSError, ValueError) as error:
            late = isinstance(error, TimeoutError) or time.monotonic() > end
            why = str(error) if isinstance(error, PageError) else f"cannot be read: {error!r}"
            why = f"took longer than {self.seconds:g} seconds" if late else why
            line = "".join(c if c.isprintable() else " " for c in f"{url[:200]} {why:.200}")
            raise PageError(" ".join(line.split())) from None
        return f"{title}\n\n{choose_passages(text, query, passages or self.passages)}".strip()

    def connect(self, host, port, end):
        """A socket to a host that may be reached."""
        pair = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if pair not in self.allow and port not in PORTS:
            raise PageError(f"is on port {port}: only 80 and 443 can be read")
        asked = self.lookups.submit(self.resolve, host, port, type=socket.SOCK_STREAM)
        try:
            found = list(dict.fromkeys(each[4][0] for each in asked.result(end - time.monotonic())))
        except (socket.gaierror, UnicodeError):
            raise PageError(f"has a host that does not exist: {host}") from None
        # One forbidden address is enough to refuse the host, whose owner decides on their order
        if pair not in self.allow and not all(map(is_public, found)):
            raise PageError(f"has a host that is not on the public internet: {host}")
        for left, address in zip(range(len(found), 0, -1), found, strict=True):
            try:
                wait = max((end - time.monotonic()) / left, 0.001)
                return socket.create_connection((address, port), wait)
            except OSError:
                continue
        raise PageError(f"has a host that does not answer: {host}")

    def fetch(self, url, end):
        """The page at a URL or where that redirects to, as READER takes it."""
        for _ in range(self.redirects + 1):
            secure, host, port, target = split_url(url)
            line = self.connect(host, port, end)
            try:
                if secure:
                    line = self.tls.wrap_socket(line, server_hostname=host)
                connection = http.client.HTTPConnection(host, port)
                connection.default_port, connection.sock = PORTS[secure], Timed(line, end)
                location, page = self.request(connection, target)
            finally:
                line.close()
            if page:
                return page
            url = urljoin(url, location)
        raise PageError(f"redirects more than {self.redirects} times")

    def request(self, connection, target):
        """One GET -> (target of a redirect, None) or (None, page)."""
        connection.request("GET", target, headers=HEADERS)
        reply = connection.getresponse()
        location = reply.getheader("location", "").encode("latin-1").decode(errors="replace")
        if reply.status in (301, 302, 303, 307, 308) and location:
            return location, None
        if not 200 <= reply.status < 300:
            raise PageError(f"is not there: status {reply.status}")
        kind, _, rest = (reply.getheader("content-type") or "text/html").lower().partition(";")
        if not READABLE.fullmatch(kind := kind.strip()):
            raise PageError(f"is no text: {kind}")
        if (reply.getheader("content-encoding") or "identity").strip().lower() != "identity":
            raise PageError("comes compressed, although that was not asked for")  # maybe a bomb
        data = bytearray()
        while chunk := reply.read1(65536):
            data += chunk
            if len(data) > self.max_bytes:
                raise PageError(f"is larger than {self.max_bytes:,} bytes")
        if reply.length:
            raise PageError(f"cannot be read: {reply.length:,} bytes are missing at its end")
        charset = re.search(r"charset=[\"']?([\w.:-]+)", rest)
        return None, {"data": base64.b64encode(data).decode(), "text": self.text,
                      "html": "html" in kind, "charset": charset[1] if charset else ""}

    def extract(self, page, seconds):
        """The (title, text) of a page, read in the jail."""
        done = self.jail.run(READER, stdin=json.dumps(page), seconds=max(seconds, 0.1))
        if done.status == "broken" or done.error.startswith(("ImportError", "ModuleNotFoundError")):
            raise BrowserBroken(f"the jail cannot read pages: {done.error}")
        if done.status != "ok":
            raise PageError(f"cannot be read ({done.status})")
        try:
            title, text, fault = map(str, json.loads(done.stdout))
        except (TypeError, ValueError, RecursionError):  # the page has taken over the reader
            raise PageError("cannot be read") from None
        if fault or not text:
            raise PageError(fault or "holds no text")
        return title, text


class Timed:
    """A socket whose every wait ends at a deadline."""

    def __init__(self, line, end):
        self.line, self.end = line, end

    def left(self):
        if (left := self.end - time.monotonic()) <= 0:
            raise TimeoutError
        self.line.settimeout(left)
        return self.line

    def sendall(self, data):
        self.left().sendall(data)

    def makefile(self, mode):
        return io.BufferedReader(Raw(self), 65536)

    def close(self):
        """Nothing: http.client closes the socket of "Connection: close" before the body is read."""


class Raw(io.RawIOBase):
    def __init__(self, timed):
        self.timed = timed

    def readable(self):
        return True

    def readinto(self, buffer):
        return self.timed.left().recv_into(buffer)
