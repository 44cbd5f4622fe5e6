// RMS norms of many rows.

#include "kernels.h"
#include "norm.h"

// Values from which on a second thread is worth its waking.
enum { FEW = 1 << 16 };

// x and y [rows, size], which may be the same; weight [size].
void rms_norm(
    const float *x, const float *weight, float *y, long rows, long size, float epsilon, float offset, int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++)
        normalize(x + row * size, weight, y + row * size, size, epsilon, offset);
}
