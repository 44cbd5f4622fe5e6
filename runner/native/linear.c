// Products in float32 of few rows with weights packed into panels, x W^T, and MLPs of three of them.

#include "functions.h"

// The activations of packed_gated_mlp, by the numbers that Python gives them.
enum { SILU, GELU_TANH };

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

// How rows of x are multiplied: in strips, with as many panels at a time.
//
// Two panels, and rows in strips if there are more than the registers hold sums of; but one panel where that holds them
// all in one strip.
struct cut {
    int panels;
    long rows, strips, strip;  // `strip` rows in each but the last
};

static struct cut cut_of(long rows)
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

// The functions that follow divide their work among the threads that call them together, and wait for each other.

// x [rows, steps] becomes [strips, steps, rows of the strip]: what a tile reads at one step lies together.
static void lay_out(const struct cut *cut, const float *x, long steps, float *laid_out)
{
#pragma omp for
    for (long step = 0; step < steps; step++)
        for (long first = 0; first < cut->rows; first += cut->strip) {
            const long count = rows_of(cut, first);
            for (long row = 0; row < count; row++)
                laid_out[first * steps + step * count + row] = x[(first + row) * steps + step];
        }
}

static void write(const lanes *sums, int panels, const float *bias, long first, long columns, float *y)
{
    float values[2 * LANES];
    memcpy(values, sums, panels * sizeof(lanes));
    const long count = columns - first < panels * LANES ? columns - first : panels * LANES;
    for (long i = 0; i < count; i++) y[first + i] = values[i] + (bias ? bias[first + i] : 0);
}

// y [rows, columns] = x W^T + bias, if there is one.
static void multiply(
    const struct cut *cut, const float *laid_out, const float *packed, const float *bias, long columns, long steps,
    float *y)
{
#pragma omp for
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
                write(sums + row * cut->panels, cut->panels, bias, column, columns, y + (first + row) * columns);
        }
}

// gated [rows, columns] = activation(x gate^T) * (x up^T) for packed weights [columns, steps]. It is laid out as
// lay_out would, for the product that follows.
static void multiply_gated(
    const struct cut *cut, const float *laid_out, const float *gate, const float *up, int activation, long columns,
    long steps, float *gated)
{
    // In floats. C knows no difference of pointers into different memory.
    const long from_gate_to_up = ((intptr_t)up - (intptr_t)gate) / (intptr_t)sizeof(float);
#pragma omp for
    for (long column = 0; column < columns; column += LANES)
        for (long first = 0; first < cut->rows; first += cut->strip) {
            const long count = rows_of(cut, first), offset = column * steps;
            const float *part = laid_out + first * steps;
            // Two panels: of each row, the gate's sum and then up's. One: the gate's of all rows, and then up's.
            lanes sums[ROWS_BY_1 * 2];
            if (cut->panels == 1) {
                tile_by_1(count, part, 1, count, gate + offset, steps, sums);
                tile_by_1(count, part, 1, count, up + offset, steps, sums + count);
            } else
                tile_by_2(count, part, 1, count, gate + offset, from_gate_to_up, steps, sums, 2);
            for (long row = 0; row < count; row++) {
                const long at = cut->panels == 1 ? row : 2 * row, beside = cut->panels == 1 ? count : 1;
                const lanes opened = sums[at], through = sums[at + beside];
                const lanes result = (activation == SILU ? silu_of(opened) : gelu_tanh_of(opened)) * through;
                for (long lane = 0; lane < LANES && column + lane < columns; lane++)
                    gated[first * columns + (column + lane) * count + row] = result[lane];
            }
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
        multiply(&how, room, packed, bias, columns, steps, y);
    }
}

// y [rows, columns] = (activation(x gate^T) * (x up^T)) down^T for packed weights gate and up [inner, steps] and down
// [columns, inner]; room for rows * (steps + inner) floats.
void packed_gated_mlp(
    const float *x, const float *gate, const float *up, const float *down, int activation, float *y, long rows,
    long columns, long inner, long steps, float *room, int threads)
{
    if (!rows) return;
    const struct cut how = cut_of(rows);
    float *gated = room + rows * steps;
#pragma omp parallel num_threads(threads)
    {
        lay_out(&how, x, steps, room);
        multiply_gated(&how, room, gate, up, activation, inner, steps, gated);
        multiply(&how, gated, down, 0, columns, inner, y);
    }
}
