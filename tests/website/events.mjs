// What the page says of kernels' own blocks, and of a training's memory: questions come in on standard input.
import { readFileSync } from "node:fs";
import { embeddingProgram, gpuOf, normBackwardProgram, reductionScratch } from "../../website/_static/events.js";
import { breakdown, memoryOf } from "../../website/_static/memory.js";

const ANSWERS = {
  reduction: ({ shape, stride, dims, bytes, capability }) => reductionScratch(shape, stride, dims, gpuOf(capability), bytes),
  embedding: ({ count, weights, width, half, capability }) =>
    embeddingProgram(count, weights, width, half, gpuOf(capability)),
  "norm backward": ({ rows, width, sizes, copies, capability }) =>
    normBackwardProgram(rows, width, sizes, copies, gpuOf(capability)),
  memory: ({ recipe, sizes, card, categories }) => {
    const { parts, phase, operation } = breakdown(memoryOf(recipe, sizes, card), categories);
    const { peakBytes, reservedBytes, neededBytes, fits } = memoryOf(recipe, sizes, card);
    return { parts, phase, operation, peakBytes, reservedBytes, neededBytes, fits };
  },
};

const questions = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(questions.map(([what, given]) => ANSWERS[what](given))));
