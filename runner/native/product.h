// Products in float32 of few rows with weights packed into panels, x W^T.

#ifndef KVCORE_PRODUCT_H
#define KVCORE_PRODUCT_H

#include "tile.h"

// How rows of x are multiplied: in strips, with as many panels at a time.
//
// Two panels, and rows in strips if there are more than the registers hold sums of; but one panel where that holds them
// all in one strip.
struct cut {
    int panels;
    long rows, strips, strip;  // `strip` rows in each but the last
};

static inline struct cut cut_of(long rows)
{
    const int panels = rows > ROWS_BY_2 && rows <= ROWS_BY_1 ? 1 : 2;
    const long strips = panels == 1 ? 1 : rounded_up(rows, ROWS_BY_2) / ROWS_BY_2;
    return (struct cut){panels, rows, strips, rounded_up(rows, strips) / strips};
}

// Of the strip that begins with row `first`.
static inline long rows_of(const struct cut *cut, long first)
{
    return cut->rows - first < cut->strip ? cut->rows - first : cut->strip;
}

// The functions that follow divide their work among the threads that call them together.

// x [rows, steps] becomes [strips, steps, rows of the strip]: what a tile reads at one step lies together.
// Returns when all of it is there.
static inline void lay_out(const struct cut *cut, const float *x, long steps, float *laid_out)
{
#pragma omp for
    for (long step = 0; step < steps; step++)
        for (long first = 0; first < cut->rows; first += cut->strip) {
            const long count = rows_of(cut, first);
            for (long row = 0; row < count; row++)
                laid_out[first * steps + step * count + row] = x[(first + row) * steps + step];
        }
}

static inline void write(const lanes *sums, int panels, const float *bias, long first, long columns, float *y)
{
    float values[2 * LANES];
    memcpy(values, sums, panels * sizeof(lanes));
    const long count = columns - first < panels * LANES ? columns - first : panels * LANES;
    for (long i = 0; i < count; i++) y[first + i] = values[i] + (bias ? bias[first + i] : 0);
}

// y [rows, columns], from one row to the next y_row floats, = x W^T + bias, if there is one. Returns when this thread's
// share is there.
static inline void multiply(
    const struct cut *cut, const float *laid_out, const float *packed, const float *bias, long columns, long steps,
    float *y, long y_row)
{
#pragma omp for nowait
    for (long column = 0; column < columns; column += cut->panels * LANES)
        for (long first = 0; first < cut->rows; first += cut->strip) {
            const long count = rows_of(cut, first);
            const float *part = laid_out + first * steps, *panel = packed + column * steps;
            lanes sums[ROWS_BY_1 * 2];
            if (cut->panels == 1)
                tile_by_1(count, part, 1, count, panel, steps, sums);
            else
                tile_by_2(count, part, 1, count, panel, LANES * steps, steps, sums, 2);
            for (long row = 0; row < count; row++)
                write(sums + row * cut->panels, cut->panels, bias, column, columns, y + (first + row) * y_row);
        }
}

#endif
