// The lane of a sequence with drafts: which tokens were drafts, and how many were kept in each step.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Lanes } from "../../mie/page/web/lanes.js";

test("a verified step makes the kept drafts and the token after them", () => {
  const lanes = new Lanes();
  const seq = "0.0";
  lanes.add(1, [
    { kind: "add", number: 0, request_id: "a", rank: 0, num_prompt: 3, n: 1, max_tokens: 9 },
    { kind: "admit", seq, row: 0, num_tokens: 3, num_computed: 0 },
    { kind: "prefill", seq, start: 0, count: 3, choices: [0] },
  ]);
  lanes.add(2, [{ kind: "verify", seq, start: 3, count: 4, num_accepted: 2 }]);
  lanes.add(3, [{ kind: "verify", seq, start: 6, count: 2, num_accepted: 0 }]);
  const lane = lanes.all.get(seq);
  assert.equal(lane.computed, 7);
  assert.deepEqual([3, 4, 5, 6, 7].map((position) => lane.madeAt(position)), [1, 2, 2, 2, 3]);
  assert.deepEqual([...lane.drafted], [4, 5]);
  assert.deepEqual([...lane.verified], [[2, { kept: 2, count: 4 }], [3, { kept: 0, count: 2 }]]);
  assert.deepEqual(lane.parts.map(({ kind, from, to }) => [kind, from, to]), [["waiting", 1, 1], ["prefill", 1, 1], ["decode", 2, 3]]);
});
