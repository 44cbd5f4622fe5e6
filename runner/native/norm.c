// y = x / sqrt(mean(x^2) + epsilon) * (offset + weight), row by row, in float32.

#include "tile.h"
#include <math.h>

// Values from which on a second thread is worth its waking.
enum { FEW = 1 << 16 };

void rms_norm(
    const float *x, const float *weight, float *y, long rows, long size, float epsilon, float offset, int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = y + row * size;
        lanes squares = {0};
        long i = 0;
        for (; i + LANES <= size; i += LANES) {
            const lanes values = *(const lanes *)(from + i);
            squares += values * values;
        }
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
        for (; i < size; i++) sum += from[i] * from[i];
        const float factor = 1 / sqrtf(sum / size + epsilon);
        for (i = 0; i < size; i++) to[i] = (from[i] * factor) * (offset + weight[i]);
    }
}
