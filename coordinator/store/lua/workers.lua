-- ARGV: how many workers at most, or 0; of a larger pool none is read. Returns a row per worker: {info, load, alive, pending, prefills, reserved, decodes, answers}.
local workers, most = {}, tonumber(ARGV[1])
if most > 0 and redis.call('ZCARD', key('nodes')) > most then return workers end
for _, id in ipairs(worker_ids()) do
  local row = redis.call('HMGET', key('node:', id), 'info', 'load', 'until', 'pending', 'prefills', 'reserved', 'decodes',
    'answers', 'died')
  if row[1] then
    row[3] = (not row[9] and tonumber(row[3]) > NOW_MS) and 1 or 0
    row[9] = nil
    workers[#workers + 1] = row
  end
end
return workers
