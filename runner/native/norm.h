// The RMS norm of a row (https://arxiv.org/abs/1910.07467).

#ifndef KVCORE_NORM_H
#define KVCORE_NORM_H

#include "tile.h"
#include <math.h>

// to = from / sqrt(mean(from^2) + epsilon) * (offset + weight), `size` floats each; `to` may be `from`.
static inline void normalize(
    const float *from, const float *weight, float *to, long size, float epsilon, float offset)
{
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

#endif
