// Every kernel of a process with its start and end in nanoseconds, one a line, to the file that FLINT_TRACE names. The
// driver loads it into a process that is started with CUDA_INJECTION64_PATH; NVIDIA's CUPTI does the rest. Unlike a profiler
// that runs kernels one by one, it sees the gaps between them, inside graphs too.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *out;

static void CUPTIAPI give(uint8_t **buffer, size_t *size, size_t *records) {
    *size = 4u << 20;
    *buffer = aligned_alloc(64, *size);
    *records = 0;
}

static void CUPTIAPI take(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL && record->kind != CUPTI_ACTIVITY_KIND_KERNEL) continue;
        const KERNEL *kernel = (const KERNEL *)record;
        fprintf(out, "%llu %llu %u %d,%d,%d %s\n", (unsigned long long)kernel->start, (unsigned long long)kernel->end,
                kernel->graphId, kernel->gridX, kernel->gridY, kernel->gridZ, kernel->name);
    }
    fflush(out);
    free(buffer);
}

static void finish(void) { cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED); }

int InitializeInjection(void) {
    const char *path = getenv("FLINT_TRACE");
    out = path ? fopen(path, "w") : NULL;
    if (!out) return 0;
    cuptiActivityRegisterCallbacks(give, take);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityFlushPeriod(20);
    atexit(finish);
    return 1;
}
