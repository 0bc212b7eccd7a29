"""The machine's true limit: float32 fused multiply-adds per second on all cores, by a few lines of C.

A matrix product is no limit: on some CPUs it reaches less than nine tenths of this.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
typedef float lanes __attribute__((vector_size(64)));
enum { CHAINS = 16, TURNS = 4000000 };
static void *work(void *result) {
    lanes sums[CHAINS], a, b;
    for (int i = 0; i < 16; i++) { a[i] = 0.999f; b[i] = 1e-3f * i; }
    for (int c = 0; c < CHAINS; c++) sums[c] = b + (float)c;
    for (int turn = 0; turn < TURNS; turn++)
        for (int c = 0; c < CHAINS; c++) sums[c] = sums[c] * a + b;
    float total = 0;
    for (int c = 0; c < CHAINS; c++) total += sums[c][c];
    *(float *)result = total;
    return 0;
}
int main(int argc, char **argv) {
    int cores = atoi(argv[1]);
    pthread_t threads[1024];
    float results[1024];
    double best = 0;
    for (int round = 0; round < 4; round++) {
        struct timespec start, stop;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < cores; i++) pthread_create(&threads[i], 0, work, &results[i]);
        for (int i = 0; i < cores; i++) pthread_join(threads[i], 0);
        clock_gettime(CLOCK_MONOTONIC, &stop);
        double seconds = stop.tv_sec - start.tv_sec + 1e-9 * (stop.tv_nsec - start.tv_nsec);
        double rate = 2.0 * 16 * CHAINS * (double)TURNS * cores / seconds;
        if (rate > best) best = rate;
    }
    fprintf(stderr, "%f\n", results[0]);
    printf("%f\n", best);
    return 0;
}
"""


def fma_peak(cores: int) -> float | None:
    """Floating-point operations per second, two for each multiply-add; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "peak.c", Path(folder) / "peak"
        source.write_text(SOURCE)
        flags = ["-O3", "-march=native", "-ffast-math", "-funroll-loops", "-pthread"]
        done = subprocess.run([compiler, *flags, source, "-o", program], capture_output=True, check=False)
        if done.returncode:
            return None
        ran = subprocess.run([program, str(cores)], capture_output=True, text=True, check=False)
        return float(ran.stdout) if ran.returncode == 0 else None
