// What attention begins with: queries, keys and values of a few rows, normed and rotated where the layer does so.

#include "kernels.h"
#include "norm.h"
#include "product.h"

// Rotary embedding (https://arxiv.org/abs/2104.09864) of a vector [size]: element i of the first half makes a pair with
// element i of the second.
static void rotate(float *vector, const float *cosines, const float *sines, long size)
{
    const long half = size / 2;
    for (long i = 0; i < half; i++) {
        const float first = vector[i], second = vector[half + i];
        vector[i] = first * cosines[i] - second * sines[i];
        vector[half + i] = second * cosines[half + i] + first * sines[half + i];
    }
}

// y [rows, all heads, head_size], those of the queries first and of the values last, from x [rows, steps]. Cosines and
// sines are [rows, head_size], or null: nothing is rotated. Room for rows * steps floats.
void packed_qkv(
    const struct qkv *layer, const float *x, const float *cosines, const float *sines, float *y, long rows, float *room,
    int threads)
{
    if (!rows) return;
    const struct cut how = cut_of(rows);
    const long size = layer->head_size;
    const long normed_heads = layer->heads[QUERIES] + layer->heads[KEYS];
    const long all_heads = normed_heads + layer->heads[VALUES];
#pragma omp parallel num_threads(threads)
    {
        lay_out(&how, x, layer->steps, room);
        float *first = y;
        for (int kind = QUERIES; kind < KINDS; kind++) {
            const long columns = layer->heads[kind] * size;
            multiply(
                &how, room, layer->weights[kind], layer->biases[kind], columns, layer->steps, first, all_heads * size);
            first += columns;
        }
#pragma omp barrier
#pragma omp for
        for (long item = 0; item < rows * normed_heads; item++) {
            const long row = item / normed_heads, head = item % normed_heads;
            const int kind = head < layer->heads[QUERIES] ? QUERIES : KEYS;
            float *vector = y + (row * all_heads + head) * size;
            if (layer->norms[kind])
                normalize(vector, layer->norms[kind], vector, size, layer->epsilons[kind], layer->offsets[kind]);
            if (cosines) rotate(vector, cosines + row * size, sines + row * size, size);
        }
    }
}
