"""Messages from the RFCs and from real devices, and some malformed ones."""

# ruff: noqa: E501
from __future__ import annotations

RFC_5424 = [
    "<34>1 2003-10-11T22:14:15.003Z mymachine.example.com su - ID47 - \ufeff'su root' failed for lonvick on /dev/pts/8",
    "<165>1 2003-08-24T05:14:15.000003-07:00 192.0.2.1 myproc 8710 - - %% It's time to make the do-nuts.",
    '<165>1 2003-10-11T22:14:15.003Z mymachine.example.com evntslog - ID47 [exampleSDID@32473 iut="3" eventSource="Application" eventID="1011"] \ufeffAn application event log entry...',
    '<165>1 2003-10-11T22:14:15.003Z mymachine.example.com evntslog - ID47 [exampleSDID@32473 iut="3" eventSource="Application" eventID="1011"][examplePriority@32473 class="high"]',
]
RFC_3164 = [
    "<34>Oct 11 22:14:15 mymachine su: 'su root' failed for lonvick on /dev/pts/8",
    "Use the BFG!",
    "<13>Feb  5 17:32:18 10.0.0.99 Use the BFG!",
    "<165>Aug 24 05:34:00 CST 1987 mymachine myproc[10]: %% It's time to make the do-nuts.  %%  Ingredients: Mix=OK, Jelly=OK #",
    "<0>1990 Oct 22 10:52:01 TZ-6 scapegoat.dmz.example.org 10.1.2.3 sched[0]: That's All Folks!",
    "<0>Oct 22 10:52:12 scapegoat 1990 Oct 22 10:52:01 TZ-6 scapegoat.dmz.example.org 10.1.2.3 sched[0]: That's All Folks!",
]
VARIANTS = [
    "<13>Oct  5 17:32:18 sshd[42]: no host here",
    "<13>Oct 5 17:32:18 kernel: [ 12.3] one digit",
    "<13>2003-10-11T22:14:15.003456+02:00 host app[1]: rsyslog's forward format",
    "<13>2003-10-11 22:14:15,5 host app: a comma and no zone",
    "Oct 11 22:14:15 host app: no PRI",
    "2003-10-11T22:14:15Z host app: no PRI",
    "<189>123: *Mar  1 18:48:50.483 UTC: %SYS-5-CONFIG_I: Configured from console by vty2 (10.34.195.36)",
    "<187>64: router1: Oct 11 22:14:15: %LINK-3-UPDOWN: Interface GigabitEthernet0/1, changed state to up",
    "<166>Jul 20 2017 06:57:36: %ASA-6-302013: Built outbound TCP connection",
    "<166>Jul 20 2017 06:57:36 fw01 : %ASA-6-302013: Built outbound TCP connection",
    "<189>: 2021 Jan  5 14:01:02 CET: %ETHPORT-5-IF_UP: Interface up",
    "<14>myapp: hello", "<14>myapp[7] hello", "<14>hello world", "<14>", "<14>:", "<14> ", "",
    "<13>Oct 11 22:14:15 host", "<13>Oct 11 22:14:15", "<13>Oct 11 22:14:15 ",
    "<13>Oct 11 22:14:15 fe80::1 app: an IPv6 host", "<13>Oct 11 22:14:15 host http://x is down",
    "<13>Oct 11 22:14:15 host last message repeated 3 times",
    "<192>Oct 11 22:14:15 host app: priority", "<999>1 - - - - - -", "<+1>x", "< 1>x", "<1 >x", "<013>x: y", "<a>b",
    "<13>Feb 30 01:02:03 host app: no such day", "<13>Oct 11 25:02:03 host app: no such hour",
    "<13>Jan  6 01:02:03 host app: tomorrow", "<13>Jan  8 01:02:03 host app: last year", "<13>Dec 31 23:59:59 h a: b",
    "<34>1 - - - - - -", "<34>1 - - - - - - ", "<34>1 - - - - - - x", "<34>1 - - - - -", "<34>1 - a", "<34>2 - - - - - - x",
    "<34>1 2003-10-11 host app - - - no clock", "<34>1 2003-10-11T22:14:15 host app - - - no zone",
    "<34>1 2003-10-11T22:14:60Z host app - - - leap", "<34>1 2003-10-11T22:14:15.123456789Z h a p m - nanos",
    '<34>1 - h a p m [x@1 a="q\\"u\\]o\\\\te\\n" b=""] msg', '<34>1 - h a p m [x@1 ip="1" ip="2"][y] msg', "<34>1 - h a p m [x] msg",
    '<34>1 - h a p m [x@1 a="open] msg', '<34>1 - h a p m [x@1 a="1"]msg', "<34>1 - h a p m [] msg", "<34>1 - h a p m nodata here",
    '<34>1 - h a p m [x@1  a="two blanks" ] msg', '<34>1 - h a p m [x@1 a="unescaped ] b"] msg', '<34>1 - h a p m [x a="line\nbreak\x1f"] one\ntwo\x1f',
    "\x1f<34>Oct 11 22:14:15 host app: x", "<34>Oct 11 22:14:15 ho\x1fst app: x\x1fy", "\x1f" * 14, "a" + "\x1f" * 12, "<34>\x1fa: b\x1f",
    "<34>Oct 11 22:14:15 hôst äpp[1]: ünï", "<34>1 - hôst äpp 1 m - ünï",
]  # fmt: skip
SAMPLES = [*RFC_5424, *RFC_3164, *VARIANTS]
NO_UTF_8 = [b"<34>1 - \xff\xfe a p m - \xff", b"\xff", b"<3>\xe4pp: \xff"]
