// Linear layers: how their weights are packed, and their product with few rows, x W^T + bias.

#include "kernels.h"
#include "product.h"

// Panels come in pairs.
static long packed_columns(long columns) { return rounded_up(columns, 2 * LANES); }

// Floats of a packed weight [columns, steps].
long packed_size(long columns, long steps) { return packed_columns(columns) * steps; }

// Packs a weight [columns, steps]. Columns behind the last are zeros.
void pack_weight(const float *weight, long columns, long steps, float *packed, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (long first = 0; first < packed_columns(columns); first += LANES)
        for (long step = 0; step < steps; step++)
            for (long lane = 0; lane < LANES; lane++) {
                const long column = first + lane;
                packed[first * steps + step * LANES + lane] = column < columns ? weight[column * steps + step] : 0;
            }
}

// x [rows, steps], y [rows, columns], bias [columns] or null, room for rows * steps floats.
void packed_product(
    const float *x, const float *packed, const float *bias, float *y, long rows, long columns, long steps, float *room,
    int threads)
{
    if (!rows) return;
    const struct cut how = cut_of(rows);
#pragma omp parallel num_threads(threads)
    {
        lay_out(&how, x, steps, room);
        multiply(&how, room, packed, bias, columns, steps, y, columns);
    }
}
