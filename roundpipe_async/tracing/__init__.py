"""What ran where and when: recorded by streams, shown as tables, timelines and Chrome's JSON."""
