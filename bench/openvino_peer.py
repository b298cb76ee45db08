"""OpenVINO GenAI, in a process and a Python of its own: lines of JSON in, lines of JSON out.

    venv/bin/python bench/openvino_peer.py MODEL.gguf MOST_REQUESTS

It has no HTTP server, so none of a server's cost is in its figures. Imports nothing of ours.
"""

import json
import sys
import time

import numpy
import openvino
import openvino_genai


def main() -> None:
    path, most = sys.argv[1], int(sys.argv[2])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = most
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU")
    for number, line in enumerate(sys.stdin):
        work = json.loads(line)
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = work["num_tokens"]
        settings.ignore_eos = True
        settings.do_sample = False
        started = time.perf_counter()
        handles = []
        for nth, prompt in enumerate(work["prompts"]):
            ids = openvino.Tensor(numpy.array([prompt], numpy.int64))
            handles.append(pipeline.add_request(number * most + nth, ids, settings))
        first, last = [0.0] * len(handles), [0.0] * len(handles)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - started
            for nth, handle in enumerate(handles):
                if handle.can_read():
                    handle.read()
                    first[nth] = first[nth] or now
                    last[nth] = now
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "requests": list(zip(first, last, strict=True))}
        print(json.dumps(answer), flush=True)


main()
