// y = x W^T + bias in float32, for few rows of x and a weight packed into panels.

#include "tile.h"

// Panels come in pairs.
static long packed_columns(long columns) { return rounded_up(columns, 2 * LANES); }

// Floats of a packed weight [columns, steps].
long packed_size(long columns, long steps) { return packed_columns(columns) * steps; }

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

static void write(const lanes *sums, int panels, const float *bias, long first, long columns, float *y)
{
    float values[2 * LANES];
    memcpy(values, sums, panels * sizeof(lanes));
    const long count = columns - first < panels * LANES ? columns - first : panels * LANES;
    for (long i = 0; i < count; i++) y[first + i] = values[i] + (bias ? bias[first + i] : 0);
}

// x [rows, steps], y [rows, columns], bias [columns] or null, room for rows * steps floats.
//
// Two panels at a time, rows in strips if there are more than the registers hold sums of; but one panel where that holds
// them all in one strip.
void packed_product(
    const float *x, const float *packed, const float *bias, float *y, long rows, long columns, long steps, float *room,
    int threads)
{
    if (!rows) return;
    const int panels = rows > ROWS_BY_2 && rows <= ROWS_BY_1 ? 1 : 2;
    const long strips = panels == 1 ? 1 : rounded_up(rows, ROWS_BY_2) / ROWS_BY_2;
    const long strip = rounded_up(rows, strips) / strips;  // rows of each but the last
#pragma omp parallel num_threads(threads)
    {
        // [strips, steps, rows of the strip]: what a tile reads at one step lies together.
#pragma omp for
        for (long step = 0; step < steps; step++)
            for (long first = 0; first < rows; first += strip) {
                const long count = rows - first < strip ? rows - first : strip;
                for (long row = 0; row < count; row++)
                    room[first * steps + step * count + row] = x[(first + row) * steps + step];
            }
#pragma omp for
        for (long column = 0; column < columns; column += panels * LANES)
            for (long first = 0; first < rows; first += strip) {
                const long count = rows - first < strip ? rows - first : strip;
                const float *part = room + first * steps, *panel = packed + column * steps;
                lanes sums[ROWS_BY_1 * 2];
                if (panels == 1)
                    tile_by_1(count, part, 1, count, panel, steps, sums);
                else
                    tile_by_2(count, part, 1, count, panel, LANES * steps, steps, sums);
                for (long row = 0; row < count; row++)
                    write(sums + row * panels, panels, bias, column, columns, y + (first + row) * columns);
            }
    }
}
